// Mathematics in answers, as MathML. The converter is a file of its own, loaded with the first formula.

import { make } from "./dom";

type Convert = (source: string, into: HTMLElement, isBlock: boolean) => void;

declare global {
  interface Window {
    quireMath?: Convert;
  }
}

const MAX_CHARS = 4000; // of a formula; a longer one is shown as it was written
let loading: Promise<Convert> | null = null;

function load(): Promise<Convert> {
  loading ??= new Promise((done, failed) => {
    const script = make("script", { src: "page/math.js" });
    script.onload = () => (window.quireMath ? done(window.quireMath) : failed(new Error("no converter")));
    script.onerror = () => {
      loading = null; // the next formula tries again
      failed(new Error("not loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

/** Show a formula in TeX. Until it is converted, and if it cannot be, its source stands there. */
export function mathElement(source: string, isBlock: boolean): HTMLElement {
  const element = make("span", { class: isBlock ? "math block" : "math", dir: "ltr", title: source });
  const showSource = (): void => element.replaceChildren(make("code", {}, source));
  showSource();
  if (source.length > MAX_CHARS) return element;
  if (window.quireMath) convert(window.quireMath);
  else load().then(convert, () => undefined);
  return element;

  function convert(by: Convert): void {
    try {
      by(source, element, isBlock);
    } catch {
      showSource();
    }
  }
}
