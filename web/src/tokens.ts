// The Tokens view: what a model writes token by token, what else it might have been, and forks there.

import { button, byId, field, make, say } from "./dom";
import { Parameters } from "./parameters";
import { messageOf } from "./server";
import { TokenRun, type Alternative, type Token } from "./token_run";
import { TokenCard, percent, quoted } from "./token_text";

const MAX_RUNS = 4; // side by side

export class TokensView {
  private readonly prompt = make("textarea", { rows: 3, dir: "auto" });
  private readonly columns = make("div", { class: "token-columns" });
  private readonly others = make("aside", { class: "card others", "aria-label": "Alternatives", "aria-live": "polite" });
  readonly parameters = new Parameters("quire.tokens.parameters", { max_tokens: 64 });
  private readonly write = make("button", { class: "main" }, "Generate");
  private readonly stop = button("Stop", () => this.halt(), { hidden: true });
  private cards: TokenCard[] = [];
  private looked: { card: TokenCard; at: number } | null = null;
  private num = 0;

  constructor(private readonly model: () => string | undefined) {
    this.prompt.value = "Once upon a time";
    const settings = make("details", {}, make("summary", {}, "Parameters"), this.parameters.element);
    const row = make("div", { class: "row" }, make("span", { class: "quiet" }, "The prompt is sent unchanged, without a chat template."), this.stop, this.write);
    const form = make("form", { class: "card prompt", onsubmit: (event) => { event.preventDefault(); this.begin(); } }, field("Prompt", this.prompt), settings, row);
    byId("tokens").append(form, make("div", { class: "token-view" }, this.columns, this.others));
    byId("tokens").addEventListener("keydown", (event) => event.key === "Escape" && this.escape());
    this.clear();
  }

  private clear(): void {
    this.looked = null;
    this.others.replaceChildren(
      make("h2", {}, "Tokens and their alternatives"),
      make("p", { class: "quiet" }, "Stronger colour means lower probability. Point at a token, or move to it with the arrow keys. Choose an alternative to fork there: a second text appears next to the first."),
      make("div", { class: "scale", "aria-hidden": "true" }, make("span", {}, "certain"), make("i", {}), make("span", {}, "improbable")),
    );
    if (!this.cards.length) this.columns.replaceChildren(make("p", { class: "card quiet empty" }, "No tokens yet."));
  }

  private begin(): void {
    for (const { run } of this.cards) run.release();
    this.cards = [];
    this.num = 0;
    this.clear();
    this.columns.replaceChildren();
    void this.run(this.prompt.value, [], null);
  }

  /** Continue a prompt and given tokens, in a separate card. */
  private async run(prompt: string, given: Token[], from: TokenRun | null, origin = ""): Promise<void> {
    say("");
    const card = new TokenCard(`Branch ${++this.num}`, origin, {
      look: (which, at) => this.look(which, at),
      enter: () => this.others.querySelector<HTMLElement>("button")?.focus(),
      close: (which) => this.close(which),
    });
    let num = 0;
    const runSettings = { model: this.model(), values: this.parameters.values };
    const run = new TokenRun(prompt, runSettings, given, from, (tokens) => {
      card.add(tokens, num < given.length);
      num += tokens.length;
    });
    card.run = run;
    this.cards.push(card);
    this.columns.append(card.element);
    this.stop.hidden = false;
    card.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    try {
      await run.write();
    } catch (error) {
      say(messageOf(error));
    }
    card.showPerplexity();
    this.stop.hidden = this.cards.every((one) => one.run.isOver);
  }

  private halt(): void {
    for (const { run } of this.cards) run.stop();
  }

  /** Go back from the alternatives to their token; elsewhere, stop. */
  private escape(): void {
    if (this.looked && this.others.contains(document.activeElement)) this.looked.card.focus(this.looked.at);
    else this.halt();
  }

  private close(card: TokenCard): void {
    card.run.release();
    card.element.remove();
    this.cards = this.cards.filter((one) => one !== card);
    if (this.looked?.card === card || !this.cards.length) this.clear();
  }

  private look(card: TokenCard, at: number): void {
    const token = card.run.tokens[at];
    if (!token) return;
    this.looked?.card.mark(-1);
    card.mark(at);
    this.looked = { card, at };
    const own: Alternative[] = token.logprob === null || token.others.some(({ text }) => text === token.text) ? [] : [{ text: token.text, id: token.id, logprob: token.logprob }];
    const rows = [...own, ...token.others].map((other) => {
      const probability = Math.exp(other.logprob);
      const isIt = other.text === token.text;
      const choose = button(quoted(other.text), () => this.fork(card, at, other), { class: isIt ? "link chosen" : "link", dir: "auto", title: isIt ? "Fork here and continue after this token" : "Fork here with this token" });
      const bar = make("i", { class: "bar" });
      bar.style.setProperty("--p", probability.toFixed(4));
      return make("li", {}, choose, bar, make("span", { class: "number" }, percent(probability)));
    });
    this.others.replaceChildren(
      make("h2", {}, `Token ${at + 1}: `, make("bdi", { class: "code" }, quoted(token.text))),
      make("ul", {}, ...rows),
      make("p", { class: "quiet" }, this.cards.length < MAX_RUNS ? "Choose a token to fork here." : `${MAX_RUNS} branches are open; close one to fork again.`),
    );
  }

  /** Fork a run at a token: what stands before it is shared, and another token goes in its place. */
  private fork(card: TokenCard, at: number, other: Alternative): void {
    if (this.cards.length >= MAX_RUNS) return;
    const { run } = card;
    const chosen: Token = { text: other.text, id: other.id, logprob: other.logprob, others: run.tokens[at]?.others ?? [] };
    const given = [...run.tokens.slice(0, at), chosen];
    const name = card.element.getAttribute("aria-label") ?? "";
    void this.run(run.prompt, given, run, `from ${name.toLowerCase()}, at token ${at + 1}`);
  }
}
