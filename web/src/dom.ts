// Elements, made by hand. Whatever a model or a user wrote goes in as text, never as HTML.

type Child = Node | string;
type Options = Record<string, string | number | boolean | EventListener | undefined>;

/** Make an element. Options that begin with "on" are listeners, others attributes. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  options: Options = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== undefined && value !== false) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/** Return an element of the page's HTML. */
export function byId<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page lacks #${id}`);
  return found as T;
}

/** Make a button that says what it does. */
export function button(text: string, act: () => void, options: Options = {}): HTMLButtonElement {
  return make("button", { type: "button", onclick: act, ...options }, text);
}

/** Make an input or a select with its label. */
export function field(label: string, input: HTMLElement, hint = ""): HTMLLabelElement {
  return make("label", { class: "field", title: hint }, make("span", {}, label), input);
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

const compact = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

/** Write a number with three digits. */
export function short(value: number): string {
  return Number.isFinite(value) ? compact.format(value) : "–";
}

/** Write a duration in milliseconds. */
export function duration(ms: number): string {
  if (!Number.isFinite(ms)) return "–";
  return ms < 1000 ? `${short(ms)} ms` : `${short(ms / 1000)} s`;
}

/** Show an error above all views; an empty text hides it. */
export function say(text: string): void {
  const message = byId("said");
  message.textContent = text;
  message.hidden = !text;
}
