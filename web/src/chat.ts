// The Chat view: conversations with the model, streamed, with branches side by side.

import { asSent, follow } from "./answer";
import { ChatSettings } from "./chat_settings";
import { MAX_BRANCHES, add, begin, endOf, load, numShared, pathTo, save, versionsOf, type Conversation, type Message } from "./conversations";
import { button, byId, make, say } from "./dom";
import { ConversationList } from "./conversation_list";
import { AttachmentTray, shownFiles, shownImages } from "./images";
import { MessageView, type Actions } from "./message_view";
import { StoryDialog } from "./story";

const NARROW = 1100; // pixels, below which the settings begin closed
const MAX_ANNOUNCED = 2000; // characters
const STARTERS = ["Tell me a story about a fox.", "Who are you?", "Write a poem about the sea."];

export class ChatView {
  private readonly list = new ConversationList((one) => this.open(one), (one) => this.remove(one), (added) => this.import(added));
  private readonly story = new StoryDialog();
  private readonly thread = make("div", { class: "thread", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 });
  private readonly announcement = make("p", { class: "unseen", role: "status" }); // the last answer, for who hears the page
  private readonly input = make("textarea", { rows: 2, placeholder: "Type a message", "aria-label": "Your message", dir: "auto" });
  private readonly toAll = make("input", { type: "checkbox", onchange: () => this.refresh() });
  private readonly toAllLabel = make("label", { class: "check", hidden: true }, this.toAll, " to all branches");
  private readonly talk = make("div", { class: "talk" });
  private readonly images = new AttachmentTray(this.talk, this.input, () => this.refresh());
  private readonly send = make("button", { class: "main" }, "Send");
  private readonly wait = make("p", { class: "quiet wait", role: "status" }); // why nothing is sent
  private readonly stop = button("Stop", () => this.halt(), { hidden: true });
  private readonly open_ = button("Settings", () => this.toggle(this.settings.element.hidden), { class: "plain", "aria-controls": "chat-settings" });
  private readonly settings = new ChatSettings(() => this.keep(), () => this.closeSettings());
  private readonly streams = new Map<string, AbortController>(); // by the message that is written
  private views = new Map<string, MessageView>();
  private all: Conversation[] = load();
  private now: Conversation;
  private active = 0; // the branch that is written to
  private isFollowing = true; // the end of the thread is in sight, and stays so

  constructor(private readonly model: () => string | undefined) {
    this.now = this.all[0] ?? begin();
    const row = make("div", { class: "row" }, this.open_, this.images.button, this.images.input, this.toAllLabel, this.stop, this.send);
    const composer = make("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } }, this.images.element, make("div", {}, this.input, this.wait), row);
    const side = make("details", { class: "side", open: innerWidth > 720 }, make("summary", {}, "Conversations"), button("New conversation", () => this.open(begin(this.now)), { class: "new" }), this.list.element);
    this.talk.append(this.thread, this.announcement, composer, this.story.element);
    byId("chat").append(side, this.talk, this.settings.element);
    this.toggle(innerWidth >= NARROW);
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    this.thread.addEventListener("scroll", () => { this.isFollowing = this.isAtEnd(); });
    // Images load after they are drawn, and the tray above the composer takes room from the thread.
    this.thread.addEventListener("load", () => this.followEnd(), true);
    new ResizeObserver(() => this.followEnd()).observe(this.thread);
    byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && this.halt());
    this.open(this.now);
  }

  private toggle(isShown: boolean): void {
    this.settings.element.hidden = !isShown;
    this.open_.setAttribute("aria-expanded", String(isShown));
  }

  private closeSettings(): void {
    this.toggle(false);
    this.open_.focus();
  }

  /** Show the model's defaults for absent fields of a request. */
  showDefaults(defaults: Record<string, number>): void {
    this.settings.parameters.showDefaults(defaults);
  }

  /** Offer to send images, or not. */
  allowImages(isOn: boolean): void {
    this.images.allow(isOn);
  }

  // ---- conversations ------------------------------------------------------------------------------

  private open(conversation: Conversation): void {
    this.now = conversation;
    this.active = 0;
    this.isFollowing = true;
    this.settings.open(conversation);
    this.draw();
    this.input.focus({ preventScroll: true });
  }

  private keep(): void {
    if (this.now.messages.length) this.all = [this.now, ...this.all.filter((one) => one.id !== this.now.id)];
    const lost = save(this.all);
    if (lost) say(`The storage of this browser is full: the oldest ${lost} are not saved.`);
    this.drawList();
  }

  private remove(conversation: Conversation): void {
    for (const message of conversation.messages) this.streams.get(message.id)?.abort();
    this.all = this.all.filter((one) => one.id !== conversation.id);
    save(this.all);
    if (conversation.id === this.now.id) this.open(this.all[0] ?? begin());
    else this.drawList();
  }

  private drawList(): void {
    this.list.show(this.all, this.now);
  }

  /** Add conversations of a file in front of this browser's own. */
  private import(added: Conversation[]): void {
    const ids = new Set(added.map(({ id }) => id));
    this.all = [...added, ...this.all.filter(({ id }) => !ids.has(id))];
    const lost = save(this.all);
    if (lost) say(`The storage of this browser is full: the oldest ${lost} are not saved.`);
    this.open(this.all[0] ?? begin());
  }

  // ---- the thread -----------------------------------------------------------------------------------

  private draw(): void {
    const focus = this.focused();
    const top = this.thread.scrollTop;
    const { branches } = this.now;
    this.views = new Map();
    const paths = branches.map((leaf) => pathTo(leaf, this.now));
    const isOne = branches.length < 2;
    const shared = isOne ? (paths[0]?.length ?? 0) : numShared(paths);
    const trunk = (paths[this.active] ?? []).slice(0, shared).map((message) => this.shown(message, this.active));
    this.thread.replaceChildren(make("div", { class: "trunk" }, ...trunk));
    if (!isOne) this.thread.append(make("div", { class: "columns" }, ...paths.map((path, i) => this.column(path.slice(shared), i))));
    else if (!this.now.messages.length) this.thread.append(this.hint());
    this.thread.scrollTop = this.isFollowing ? this.thread.scrollHeight : top;
    const active = this.thread.querySelector<HTMLElement>(".column.active");
    active?.parentElement?.scrollTo({ left: active.offsetLeft - active.parentElement.offsetLeft });
    this.drawList();
    this.refresh();
    focus();
  }

  private hint(): HTMLElement {
    const starters = STARTERS.map((text) => button(text, () => { this.input.value = text; this.submit(); }));
    return make("div", { class: "hint" }, make("h2", {}, "Start a conversation"), make("div", { class: "starters" }, ...starters), make("p", { class: "quiet" }, "Conversations are stored in this browser and sent only to this server."));
  }

  private column(path: Message[], i: number): HTMLElement {
    const name = `Branch ${i + 1}`;
    const choose = button(name, () => this.choose(i), { class: "plain", "aria-pressed": String(i === this.active), title: "Send to this branch" });
    const close = button("×", () => this.close(i), { class: "plain", "aria-label": `Close ${name.toLowerCase()}` });
    const head = make("header", {}, choose, close);
    const messages = path.map((message) => this.shown(message, i));
    if (!messages.length) messages.push(make("p", { class: "quiet" }, "This branch continues from here."));
    return make("section", { class: `column${i === this.active ? " active" : ""}`, "aria-label": name }, head, ...messages);
  }

  /** Note which button has the focus; return what gives it to the one in its place. */
  private focused(): () => void {
    const at = document.activeElement;
    if (!(at instanceof HTMLElement) || !this.thread.contains(at) || at === this.thread) return () => undefined;
    const articles = (): Element[] => [...this.thread.querySelectorAll("article, .column > header")];
    const place = articles().findIndex((one) => one.contains(at));
    const name = at.getAttribute("aria-label") ?? at.textContent;
    return () => {
      const same = [...(articles()[place]?.querySelectorAll("button") ?? [])].find((one) => (one.getAttribute("aria-label") ?? one.textContent) === name);
      const open = same?.disabled ? same.parentElement?.querySelector<HTMLElement>("button:enabled") : same;
      (open ?? this.input).focus({ preventScroll: true });
    };
  }

  private shown(message: Message, branch: number): HTMLElement {
    const isGrowing = this.streams.has(message.id);
    const view = new MessageView(message, isGrowing ? {} : this.actions(message, branch), isGrowing, () => this.followEnd());
    this.views.set(message.id, view);
    return view.element;
  }

  private actions(message: Message, branch: number): Actions {
    const { now } = this;
    const versions = versionsOf(message, now);
    const isBusy = this.isBusy(branch);
    const answered = now.messages.some((one) => one.parent === message.id && one.role === "tool");
    const toolCall = now.messages.flatMap((one) => one.calls ?? []).find((call) => call.id === message.call);
    return {
      ...(isBusy || message.role !== "user" ? {} : { edit: () => this.edit(message, branch) }),
      ...(isBusy || message.role !== "assistant" ? {} : { regenerate: () => void this.answer(branch, message.parent) }),
      ...(now.branches.length < MAX_BRANCHES ? { fork: () => this.fork(message) } : {}),
      ...(isBusy ? {} : { version: { at: versions.indexOf(message), num: versions.length, show: (at) => this.lead(branch, versions[at]) } }),
      ...(isBusy || answered ? {} : { answer: (results) => this.giveResults(message, branch, results) }),
      ...(toolCall ? { title: toolCall.name } : {}),
      ...(message.request && message.role === "assistant" ? { explain: () => void this.story.show(message.request ?? "") } : {}),
    };
  }

  private followEnd(): void {
    if (this.isFollowing) this.thread.scrollTop = this.thread.scrollHeight;
  }

  private isAtEnd(): boolean {
    return this.thread.scrollHeight - this.thread.scrollTop - this.thread.clientHeight < 80;
  }

  // ---- branches ---------------------------------------------------------------------------------------

  private isBusy(branch: number): boolean {
    return this.streams.has(this.now.branches[branch] ?? "");
  }

  private choose(branch: number): void {
    this.active = branch;
    this.draw();
  }

  private close(branch: number): void {
    this.now.branches.splice(branch, 1);
    this.active = Math.min(branch, this.now.branches.length - 1);
    this.keep();
    this.draw();
  }

  /** Lead a branch along a version of a message, to its newest end. */
  private lead(branch: number, version: Message | undefined): void {
    if (!version) return;
    this.active = branch;
    this.now.branches[branch] = endOf(version, this.now);
    this.keep();
    this.draw();
  }

  /** Continue from a message in a separate branch; a question is answered at once. */
  private fork(message: Message): void {
    this.active = this.now.branches.push(message.id) - 1;
    if (message.role !== "assistant") void this.answer(this.active, message.id);
    else {
      this.keep();
      this.draw();
      this.input.focus({ preventScroll: true });
    }
  }

  // ---- asking -------------------------------------------------------------------------------------------

  /** Edit a question; the earlier one stays as a version. */
  private edit(message: Message, branch: number): void {
    const box = make("textarea", { rows: 3, "aria-label": "Edit your message", dir: "auto" });
    box.value = message.content;
    const { images = [], files = [] } = message;
    const attached = { ...(images.length ? { images } : {}), ...(files.length ? { files } : {}) };
    const hasAny = images.length + files.length > 0;
    const wasFollowing = this.isFollowing;
    this.isFollowing = false; // the box stays in sight
    const cancel = (): void => {
      this.isFollowing = wasFollowing;
      this.draw();
    };
    const form = make("form", { class: "message user editing", onsubmit: (event) => {
      event.preventDefault();
      const content = box.value.trim();
      if (content || hasAny) void this.answer(branch, add(this.now, message.parent, { role: "user", content, ...attached }).id);
    } }, ...(images.length ? [shownImages(images)] : []), ...(files.length ? [shownFiles(files)] : []), box, make("div", { class: "row" }, button("Cancel", cancel), make("button", { class: "main" }, "Resend")));
    this.views.get(message.id)?.element.replaceWith(form);
    box.focus();
  }

  private giveResults(message: Message, branch: number, results: Map<string, string>): void {
    let parent = message.id;
    for (const [call, content] of results) parent = add(this.now, parent, { role: "tool", content, call }).id;
    void this.answer(branch, parent);
  }

  private submit(): void {
    const content = this.input.value.trim();
    const targets = this.targets();
    const busy = targets.find((branch) => this.isBusy(branch));
    if (!content && this.images.isEmpty) return;
    if (busy !== undefined) {
      this.wait.textContent = busy === this.active ? "An answer is still being generated. Wait for it to finish, or press Stop (Esc)." : `Branch ${busy + 1} is still generating. Wait for it to finish, or stop it in that branch.`;
      return;
    }
    if (this.settings.problem) {
      say(this.settings.problem);
      this.toggle(true);
      return;
    }
    this.input.value = "";
    this.isFollowing = true;
    const attached = this.images.taken();
    for (const branch of targets) void this.answer(branch, add(this.now, this.now.branches[branch] ?? null, { role: "user", content, ...attached }).id);
  }

  /** Return the branches that a message goes to. */
  private targets(): number[] {
    return this.toAll.checked && this.now.branches.length > 1 ? this.now.branches.map((_, i) => i) : [this.active];
  }

  /** Request an answer to a message, in a branch that ends there. */
  private async answer(branch: number, parent: string | null): Promise<void> {
    say(this.settings.problem);
    const conversation = this.now;
    const requestFields = this.settings.requestFields;
    const messages = asSent(pathTo(parent, conversation), conversation.system);
    const body = { model: this.model(), messages, stream: true, stream_options: { include_usage: true }, ...requestFields };
    const message = add(conversation, parent, { role: "assistant", content: "" });
    const control = new AbortController();
    conversation.branches[branch] = message.id;
    this.active = branch;
    this.streams.set(message.id, control);
    this.keep();
    this.draw();
    await follow(message, body, control.signal, () => this.views.get(message.id));
    this.streams.delete(message.id);
    this.announcement.textContent = message.content.slice(0, MAX_ANNOUNCED) || (message.note ?? "");
    save(this.all);
    if (this.now === conversation) this.draw();
    else this.refresh();
  }

  private halt(): void {
    this.streams.get(this.now.branches[this.active] ?? "")?.abort();
  }

  private refresh(): void {
    const isBusy = this.isBusy(this.active);
    this.stop.hidden = !isBusy;
    this.send.disabled = isBusy;
    this.toAllLabel.hidden = this.now.branches.length < 2;
    if (!this.targets().some((branch) => this.isBusy(branch))) this.wait.textContent = "";
  }
}
