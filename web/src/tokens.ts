// The Tokens view: a text token by token, each shaded by its probability, with what else might have been.

import { button, byId, field, make, say } from "./dom";
import { Parameters } from "./parameters";
import { events, isAbort, messageOf } from "./server";

const MOST_ALTERNATIVES = 8;
const MOST_TOKENS = 4000; // that are shown

interface Chunk {
  choices: {
    text: string;
    finish_reason: string | null;
    logprobs: { tokens: string[]; token_logprobs: (number | null)[]; top_logprobs: (Record<string, number> | null)[] | null } | null;
  }[];
}

interface Token {
  text: string;
  logprob: number | null;
  others: [text: string, logprob: number][];
}

export class TokensView {
  private readonly prompt = make("textarea", { rows: 4, dir: "auto" });
  private readonly echo = make("input", { type: "checkbox" });
  private readonly shown = make("div", { class: "token-text", role: "group", "aria-label": "Tokens; arrow keys move between them", dir: "auto" });
  private readonly others = make("div", { class: "card others", "aria-live": "polite" });
  private readonly summary = make("p", { class: "quiet", role: "status" });
  private readonly parameters = new Parameters("quire.tokens", { temperature: 0.7, max_tokens: 64 });
  private readonly run = button("Write", () => void this.write(this.prompt.value), { class: "main" });
  private readonly stop = button("Stop", () => this.control?.abort(), { hidden: true });
  private tokens: Token[] = [];
  private base = ""; // the prompt of what is shown, without what was echoed
  private control: AbortController | null = null;

  constructor(private readonly model: () => string | undefined) {
    this.prompt.value = "Once upon a time";
    const echo = make("label", { class: "check" }, this.echo, " Show the prompt's own tokens, too");
    byId("tokens").append(
      make("div", { class: "card" }, field("Prompt, as it is", this.prompt), this.parameters.element, echo, make("div", { class: "row" }, this.summary, this.stop, this.run)),
      make("div", { class: "token-view" }, this.shown, this.others),
    );
    this.others.append(make("p", { class: "quiet" }, "Point at a token, or move to it, to see what else the model thought of. Choosing one goes on from there."));
    this.shown.addEventListener("keydown", (event) => this.press(event));
    this.shown.addEventListener("pointerover", (event) => this.look(event.target));
    this.shown.addEventListener("focusin", (event) => this.look(event.target));
    byId("tokens").addEventListener("keydown", (event) => event.key === "Escape" && this.control?.abort());
  }

  /** Write on behind a prompt. kept: tokens before it that stay shown. */
  private async write(prompt: string, kept: Token[] = []): Promise<void> {
    this.control?.abort();
    const control = (this.control = new AbortController());
    say("");
    if (!kept.length) this.base = this.echo.checked ? "" : prompt;
    this.tokens = [];
    this.shown.replaceChildren();
    this.add(kept);
    this.stop.hidden = false;
    const body = { model: this.model(), prompt, stream: true, logprobs: MOST_ALTERNATIVES, echo: this.echo.checked && !kept.length, ...this.parameters.values };
    try {
      for await (const chunk of events<Chunk>("v1/completions", body, control.signal)) this.add(tokensOf(chunk));
    } catch (error) {
      if (!isAbort(error) && !control.signal.aborted) say(messageOf(error));
    }
    if (this.control !== control) return;
    this.control = null;
    this.stop.hidden = true;
  }

  private add(tokens: Token[]): void {
    for (const token of tokens) {
      if (this.tokens.length >= MOST_TOKENS) return;
      const probability = token.logprob === null ? null : Math.exp(token.logprob);
      const element = make("span", { class: "token", tabindex: this.tokens.length ? -1 : 0, role: "button", "data-at": this.tokens.length }, visible(token.text));
      element.setAttribute("aria-label", `${token.text}, ${percent(probability)}`);
      if (probability !== null) element.style.setProperty("--p", probability.toFixed(3));
      else element.classList.add("given");
      this.tokens.push(token);
      this.shown.append(element);
    }
    const known = this.tokens.flatMap((token) => (token.logprob === null ? [] : [token.logprob]));
    const mean = known.reduce((sum, one) => sum + one, 0) / known.length;
    this.summary.textContent = known.length ? `${this.tokens.length} tokens, perplexity ${Math.exp(-mean).toFixed(2)}` : "";
  }

  private look(target: EventTarget | null): void {
    const at = target instanceof HTMLElement ? Number(target.dataset["at"] ?? NaN) : NaN;
    const token = this.tokens[at];
    if (!token) return;
    this.shown.querySelector(".looked")?.classList.remove("looked");
    (target as HTMLElement).classList.add("looked");
    const all = token.others.some(([text]) => text === token.text) || token.logprob === null ? token.others : [[token.text, token.logprob] as [string, number], ...token.others];
    const rows = all.map(([text, logprob]) => {
      const probability = Math.exp(logprob);
      const meter = make("meter", { min: 0, max: 1, value: probability.toFixed(4) });
      const choose = button(quoted(text), () => this.goOn(at, text), { class: text === token.text ? "link chosen" : "link", dir: "auto" });
      return make("li", {}, choose, meter, make("span", { class: "number" }, percent(probability)));
    });
    this.others.replaceChildren(make("h2", {}, `Token ${at + 1}: `, make("bdi", {}, quoted(token.text))), rows.length ? make("ul", {}, ...rows) : make("p", { class: "quiet" }, "It was given."));
  }

  /** Take another token in the place of one, and write on behind it. */
  private goOn(at: number, text: string): void {
    const kept = this.tokens.slice(0, at);
    const token = this.tokens[at];
    if (!token) return;
    const logprob = token.others.find(([other]) => other === text)?.[1] ?? token.logprob;
    const tokens = [...kept, { text, logprob, others: token.others }];
    void this.write(this.base + tokens.map((one) => one.text).join(""), tokens);
  }

  private press(event: KeyboardEvent): void {
    const now = document.activeElement;
    if (!(now instanceof HTMLElement) || now.dataset["at"] === undefined) return;
    const next = { ArrowRight: now.nextElementSibling, ArrowLeft: now.previousElementSibling, Home: this.shown.firstElementChild, End: this.shown.lastElementChild }[event.key];
    if (event.key === "Enter") this.others.querySelector<HTMLElement>("button")?.focus();
    else if (next instanceof HTMLElement) {
      now.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  }
}

function tokensOf(chunk: Chunk): Token[] {
  const found = chunk.choices[0]?.logprobs;
  if (!found) return [];
  return found.tokens.map((text, i) => {
    const others = Object.entries(found.top_logprobs?.[i] ?? {}).sort((a, b) => b[1] - a[1]);
    return { text, logprob: found.token_logprobs[i] ?? null, others };
  });
}

function percent(probability: number | null): string {
  return probability === null ? "given" : `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)} %`;
}

/** Show what has no width. */
function visible(text: string): string {
  return text === "" ? "∅" : text.replace(/\n/g, "↵\n");
}

function quoted(text: string): string {
  return text === "" ? "(nothing)" : text.replace(/\n/g, "↵").replace(/^ | $/g, "␣");
}
