// The Chat view: conversations with the model, streamed.

import { begin, branch, load, save, titleOf, type Conversation, type Message } from "./conversations";
import { button, byId, field, make, say } from "./dom";
import { GrowingText } from "./growing";
import { Parameters } from "./parameters";
import { events, isAbort, messageOf } from "./server";

interface Chunk {
  choices: { delta: { content?: string | null; reasoning_content?: string | null; reasoning?: string | null }; finish_reason: string | null }[];
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } };
}

export class ChatView {
  private readonly list = make("nav", { class: "conversations", "aria-label": "Conversations" });
  private readonly thread = make("div", { class: "thread", role: "log", "aria-label": "Conversation", tabindex: 0 });
  private readonly input = make("textarea", { rows: 2, placeholder: "Ask something", "aria-label": "Your message", dir: "auto" });
  private readonly system = make("textarea", { rows: 2, placeholder: "none", onchange: () => this.keepSystem() });
  private readonly parameters = new Parameters("quire.chat", { temperature: 0.7 });
  private readonly send = button("Send", () => this.submit(), { class: "main" });
  private readonly stop = button("Stop", () => this.control?.abort(), { hidden: true });
  private readonly usage = make("p", { class: "quiet usage", role: "status" });
  private all: Conversation[] = load();
  private now: Conversation;
  private control: AbortController | null = null;

  constructor(private readonly model: () => string | undefined) {
    this.now = this.all[0] ?? begin();
    const settings = make("details", { class: "card settings" }, make("summary", {}, "System prompt and parameters"), field("System prompt", this.system), this.parameters.element);
    const composer = make("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } }, this.input, make("div", { class: "row" }, this.usage, this.stop, this.send));
    const side = make("details", { class: "side", open: innerWidth > 720 }, make("summary", {}, "Conversations"), button("New conversation", () => this.open(begin(this.now.system)), { class: "new" }), this.list);
    byId("chat").append(side, make("div", { class: "talk" }, settings, this.thread, composer));
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && this.control?.abort());
    this.open(this.now);
  }

  private open(conversation: Conversation): void {
    this.control?.abort();
    this.now = conversation;
    this.system.value = conversation.system;
    this.usage.textContent = "";
    this.draw();
    this.input.focus({ preventScroll: true });
  }

  private keepSystem(): void {
    this.now.system = this.system.value;
    this.keep();
  }

  private keep(): void {
    if (this.now.messages.length) this.all = [this.now, ...this.all.filter((one) => one.id !== this.now.id)];
    if (!save(this.all)) say("This browser has no room left: the oldest conversations are not kept.");
    this.drawList();
  }

  private remove(conversation: Conversation): void {
    this.all = this.all.filter((one) => one.id !== conversation.id);
    save(this.all);
    if (conversation.id === this.now.id) this.open(this.all[0] ?? begin());
    else this.drawList();
  }

  private drawList(): void {
    const items = this.all.map((one) => {
      const title = titleOf(one);
      const open = button(title, () => this.open(one), { class: "link", dir: "auto" });
      if (one.id === this.now.id) open.setAttribute("aria-current", "true");
      return make("li", {}, open, button("×", () => this.remove(one), { class: "quiet", "aria-label": `Delete ${title}` }));
    });
    this.list.replaceChildren(make("ul", {}, ...items));
  }

  private draw(): void {
    this.drawList();
    this.thread.replaceChildren(...this.now.messages.map((message, i) => this.shown(message, i)));
    if (!this.now.messages.length) this.thread.append(make("p", { class: "quiet hint" }, "What is said here stays in this browser and goes to this server alone."));
    this.thread.scrollTop = this.thread.scrollHeight;
  }

  private shown(message: Message, i: number): HTMLElement {
    const article = make("article", { class: `message ${message.role}`, "aria-label": message.role === "user" ? "You" : "The model" });
    if (message.reasoning) article.append(reasoningBox(message.reasoning));
    const text = make("div", { class: "text", dir: "auto" });
    const growing = new GrowingText(text);
    growing.add(message.content);
    growing.end();
    article.append(text);
    if (message.note) article.append(make("p", { class: "quiet" }, message.note));
    article.append(this.actions(message, i));
    return article;
  }

  private actions(message: Message, i: number): HTMLElement {
    const copy = button("Copy", () => void navigator.clipboard?.writeText(message.content), { class: "small" });
    const again = message.role === "user"
      ? button("Edit", () => this.edit(i), { class: "small" })
      : button("Regenerate", () => this.regenerate(i), { class: "small" });
    const other = button("Branch", () => { this.keep(); this.open(branch(this.now, i + 1)); this.keep(); }, { class: "small", title: "Go on from here in another conversation" });
    return make("div", { class: "actions" }, again, other, copy);
  }

  /** Put a question in place of an earlier one; what followed it goes. */
  private edit(i: number): void {
    if (this.control) return;
    const box = make("textarea", { rows: 3, "aria-label": "Edit your message", dir: "auto" });
    box.value = this.now.messages[i]?.content ?? "";
    const done = (): void => {
      this.now.messages.splice(i);
      void this.ask(box.value);
    };
    const form = make("div", { class: "message user editing" }, box, make("div", { class: "row" }, button("Cancel", () => this.draw()), button("Send anew", done, { class: "main" })));
    this.thread.children[i]?.replaceWith(form);
    box.focus();
  }

  private regenerate(i: number): void {
    if (this.control) return;
    this.now.messages.splice(i);
    void this.answer();
  }

  private submit(): void {
    const text = this.input.value.trim();
    if (!text || this.control) return;
    this.input.value = "";
    void this.ask(text);
  }

  private async ask(text: string): Promise<void> {
    this.now.messages.push({ role: "user", content: text });
    await this.answer();
  }

  private body(): object {
    const messages = this.now.messages.map(({ role, content }) => ({ role, content }));
    const system = this.now.system.trim();
    return {
      model: this.model(),
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      ...this.parameters.values,
    };
  }

  private async answer(): Promise<void> {
    say("");
    const conversation = this.now;
    const body = this.body();
    const message: Message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    this.draw();
    const article = this.thread.lastElementChild as HTMLElement;
    const control = (this.control = new AbortController());
    this.waiting(true);
    try {
      await this.follow(message, article, body, control.signal);
    } catch (error) {
      message.note = isAbort(error) || control.signal.aborted ? "stopped" : `broken off: ${messageOf(error)}`;
    }
    if (this.control === control) this.control = null;
    this.waiting(this.control !== null);
    article.removeAttribute("aria-busy");
    if (this.now === conversation) {
      this.keep();
      const isAtEnd = this.isAtEnd();
      article.replaceWith(this.shown(message, conversation.messages.length - 1));
      if (isAtEnd) this.thread.scrollTop = this.thread.scrollHeight;
    } else save(this.all);
  }

  private async follow(message: Message, article: HTMLElement, body: object, signal: AbortSignal): Promise<void> {
    article.setAttribute("aria-busy", "true");
    const text = new GrowingText(article.querySelector(".text") as HTMLElement, () => this.thread.scrollTo(0, this.thread.scrollHeight));
    let thought: GrowingText | null = null;
    const since = performance.now();
    let first = 0;
    try {
      for await (const chunk of events<Chunk>("v1/chat/completions", body, signal)) {
        const choice = chunk.choices[0];
        const reasoning = choice?.delta.reasoning_content ?? choice?.delta.reasoning;
        const content = choice?.delta.content;
        if (!first && (reasoning || content)) first = performance.now();
        if (reasoning) {
          if (!thought) {
            const box = reasoningBox("");
            box.open = true;
            article.prepend(box);
            thought = new GrowingText(box.lastElementChild as HTMLElement);
          }
          message.reasoning = (message.reasoning ?? "") + reasoning;
          thought.add(reasoning);
        }
        if (content) {
          message.content += content;
          text.add(content);
        }
        if (choice?.finish_reason && choice.finish_reason !== "stop") message.note = `ended: ${choice.finish_reason}`;
        if (chunk.usage) this.tell(chunk.usage, since, first);
      }
    } finally {
      text.end();
      thought?.end();
    }
  }

  private tell(usage: NonNullable<Chunk["usage"]>, since: number, first: number): void {
    const seconds = (performance.now() - first) / 1000;
    const rate = first && usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const wait = first ? `, first after ${Math.round(first - since)} ms` : "";
    this.usage.textContent = `${usage.prompt_tokens} tokens read (${cached} from the cache), ${usage.completion_tokens} written${wait}${rate}`;
  }

  private isAtEnd(): boolean {
    return this.thread.scrollHeight - this.thread.scrollTop - this.thread.clientHeight < 80;
  }

  private waiting(isWaiting: boolean): void {
    this.stop.hidden = !isWaiting;
    this.send.disabled = isWaiting;
  }
}

function reasoningBox(text: string): HTMLDetailsElement {
  return make("details", { class: "reasoning" }, make("summary", {}, "Reasoning"), make("div", { class: "text", dir: "auto" }, text));
}
