// A run's tokens as they are shown: each shaded by how improbable it was; arrow keys move.

import { button, make } from "./dom";
import type { Token, TokenRun } from "./token_run";

const MAX_TOKENS = 4000; // that are shown

/** Callbacks of a card of tokens. */
export interface CardCallbacks {
  look(card: TokenCard, at: number): void;
  enter(): void;
  close(card: TokenCard): void;
}

export class TokenCard {
  readonly element: HTMLElement;
  run!: TokenRun;
  private readonly shown = make("div", { class: "token-text", role: "group", dir: "auto" });
  private readonly about = make("span", { class: "quiet" });
  private readonly marked: HTMLElement[] = [];
  private num = 0;
  private sum = 0; // of the logprobs that are known
  private numKnown = 0;

  constructor(name: string, from: string, private readonly callbacks: CardCallbacks) {
    this.shown.setAttribute("aria-label", `${name}: tokens; arrow keys move between them`);
    const title = make("div", {}, make("h2", {}, name), make("span", { class: "quiet" }, from));
    const close = button("×", () => callbacks.close(this), { class: "plain", "aria-label": `Close ${name.toLowerCase()}` });
    this.element = make("section", { class: "card token-card", "aria-label": name }, make("header", {}, title, close), this.shown, this.about);
    this.shown.addEventListener("keydown", (event) => this.press(event));
    for (const name of ["pointerover", "focusin"]) this.shown.addEventListener(name, (event) => this.look(event.target));
  }

  add(tokens: Token[], isGiven: boolean): void {
    for (const token of tokens) {
      if (token.logprob !== null) {
        this.sum += token.logprob;
        this.numKnown++;
      }
      const at = this.num++;
      if (at >= MAX_TOKENS) continue;
      const probability = token.logprob === null ? null : Math.exp(token.logprob);
      const element = make("span", { class: `token${isGiven ? " given" : ""}`, tabindex: at ? -1 : 0, role: "button", "data-at": at }, visible(token.text));
      element.setAttribute("aria-label", `${quoted(token.text)}, ${percent(probability)}`);
      element.style.setProperty("--p", (probability ?? 1).toFixed(3));
      this.shown.append(element);
    }
    this.showPerplexity();
  }

  showPerplexity(): void {
    const perplexity = this.numKnown ? ` · perplexity ${Math.exp(-this.sum / this.numKnown).toFixed(2)}` : "";
    const cut = this.num > MAX_TOKENS ? ` · the first ${MAX_TOKENS.toLocaleString("en")} are shown` : "";
    this.about.textContent = `${this.num} tokens${cut}${perplexity}${this.run.end ? ` · ${this.run.end}` : ""}${this.run.isShared ? " · shares blocks" : ""}`;
    this.about.title = this.run.isShared ? "The server retained the other branch. Both branches share the KV blocks before the fork; see the Engine view." : "";
  }

  /** Let a token stand out; -1 none. */
  mark(at: number): void {
    for (const one of this.marked.splice(0)) one.classList.remove("looked");
    const element = this.shown.children[at];
    if (!(element instanceof HTMLElement)) return;
    element.classList.add("looked");
    this.marked.push(element);
  }

  focus(at: number): void {
    const element = this.shown.children[at];
    if (!(element instanceof HTMLElement)) return;
    this.shown.querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
    element.tabIndex = 0;
    element.focus();
  }

  private look(target: EventTarget | null): void {
    const at = target instanceof HTMLElement ? Number(target.dataset["at"] ?? NaN) : NaN;
    if (this.run.tokens[at]) this.callbacks.look(this, at);
  }

  private press(event: KeyboardEvent): void {
    const now = document.activeElement;
    const at = now instanceof HTMLElement ? Number(now.dataset["at"] ?? NaN) : NaN;
    if (Number.isNaN(at)) return;
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.shown.children.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.callbacks.enter();
    else if (next !== undefined) this.focus(next);
    else return;
    event.preventDefault();
  }
}

export function percent(probability: number | null): string {
  return probability === null ? "given" : `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)} %`;
}

/** Show what has no width. */
function visible(text: string): string {
  return text === "" ? "∅" : text.replace(/\n/g, "↵\n");
}

export function quoted(text: string): string {
  return text === "" ? "(nothing)" : text.replace(/\n/g, "↵").replace(/^ | $/g, "␣");
}
