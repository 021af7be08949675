// One message of a chat as it is shown: its text, its reasoning, its calls, and what can be done with it.

import type { Shown } from "./answer";
import type { Call, Message } from "./conversations";
import { button, field, make } from "./dom";
import { GrowingText } from "./growing";
import { shownFiles, shownImages } from "./images";
import { MarkdownText } from "./markdown";

/** Actions on a message; unavailable ones are absent. */
export interface Actions {
  edit?: () => void;
  regenerate?: () => void;
  fork?: () => void;
  /** The versions of it: which one is shown, how many there are, and how to see another. */
  version?: { at: number; num: number; show: (at: number) => void };
  /** Submit results of its calls, by their ids, and let the model continue. */
  answer?: (results: Map<string, string>) => void;
  /** Show what happened to the request. */
  explain?: () => void;
  title?: string; // of a result: the name of the called tool
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Result" };

export class MessageView implements Shown {
  readonly element: HTMLElement;
  private readonly text: GrowingText | MarkdownText;
  private thought: GrowingText | null = null;
  private readonly calls = make("div", { class: "calls" });

  /** grown: called after each frame in which the message grew. */
  constructor(private readonly message: Message, actions: Actions, isGrowing: boolean, private readonly grown: () => void = () => undefined) {
    const name = message.role === "tool" && actions.title ? `Result of ${actions.title}` : NAMES[message.role];
    const text = make("div", { class: "text", dir: "auto" });
    this.element = make("article", { class: `message ${message.role}`, "aria-label": name, "aria-busy": isGrowing ? "true" : undefined });
    if (message.role === "tool") this.element.append(make("p", { class: "by" }, name));
    if (message.images?.length) this.element.append(shownImages(message.images));
    if (message.files?.length) this.element.append(shownFiles(message.files));
    if (message.content || !(message.images?.length || message.files?.length)) this.element.append(text);
    this.element.append(this.calls);
    this.text = message.role === "assistant" ? new MarkdownText(text, grown) : new GrowingText(text, grown);
    this.text.add(message.content);
    this.text.end();
    if (message.reasoning) this.think(message.reasoning);
    this.thought?.end();
    this.call(message.calls ?? []);
    if (isGrowing) return;
    if (message.calls?.length && actions.answer) this.element.append(this.results(message.calls, actions.answer));
    const foot = make("div", { class: "foot" }, ...this.buttons(actions));
    if (message.note) foot.append(make("span", { class: "note" }, message.note));
    if (message.usage) foot.append(make("span", { class: "usage" }, message.usage));
    this.element.append(foot);
  }

  grow(content: string): void {
    this.text.add(content);
  }

  think(reasoning: string): void {
    if (!this.thought) {
      const text = make("div", { class: "text", dir: "auto" });
      const isGrowing = this.element.hasAttribute("aria-busy");
      this.element.prepend(make("details", { class: "reasoning", open: isGrowing }, make("summary", {}, "Reasoning"), text));
      this.thought = new GrowingText(text, this.grown);
    }
    this.thought.add(reasoning);
  }

  call(calls: Call[]): void {
    this.calls.replaceChildren(...calls.map((call) => make("div", { class: "call" }, make("b", {}, "calls ", make("code", {}, call.name)), make("pre", { dir: "auto" }, pretty(call.arguments)))));
    if (calls.length) this.grown();
  }

  /** Draw what has come and was not drawn yet. */
  end(): void {
    this.text.end();
    this.thought?.end();
  }

  private buttons(actions: Actions): HTMLElement[] {
    const made: HTMLElement[] = [];
    const one = (text: string, act: (() => void) | undefined, title: string): void => {
      if (act) made.push(button(text, act, { class: "small", title }));
    };
    if (actions.version && actions.version.num > 1) {
      const { at, num, show } = actions.version;
      const before = button("‹", () => show(at - 1), { class: "small", disabled: at === 0, "aria-label": "Previous version" });
      const next = button("›", () => show(at + 1), { class: "small", disabled: at === num - 1, "aria-label": "Next version" });
      made.push(make("span", { class: "versions" }, before, make("span", { class: "number" }, `${at + 1} / ${num}`), next));
    }
    one("Edit", actions.edit, "Edit this message; the old version is kept");
    one("Regenerate", actions.regenerate, "Generate another answer; the old version is kept");
    one("Fork", actions.fork, this.message.role === "user" ? "Answer again in a second branch, side by side" : "Continue from here in a second branch, side by side");
    one("Why this time?", actions.explain, "Show when this request waited, was computed, and was interrupted");
    one("Copy", () => void navigator.clipboard?.writeText(this.message.content), "Copy the text");
    return made;
  }

  private results(calls: Call[], answer: (results: Map<string, string>) => void): HTMLElement {
    const boxes = calls.map((call) => [call, make("textarea", { rows: 2, dir: "auto", placeholder: "result of the tool" })] as const);
    const send = (): void => answer(new Map(boxes.map(([call, box]) => [call.id, box.value])));
    const fields = boxes.map(([call, box]) => field(`Result of ${call.name}`, box));
    return make("form", { class: "results", onsubmit: (event) => { event.preventDefault(); send(); } }, ...fields, make("div", { class: "row" }, make("span", {}), make("button", { class: "main" }, calls.length > 1 ? "Send results" : "Send result")));
  }
}

/** Lay JSON out; what is none, or not whole yet, stays as it is. */
function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
