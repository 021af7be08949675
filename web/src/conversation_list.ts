// The list of conversations: searched, opened, deleted; written to a file, and read from one.

import { parse, titleOf, type Conversation } from "./conversations";
import { button, make, say } from "./dom";
import { asMarkdown, download } from "./export";

const MAX_IMPORT_BYTES = 64 << 20;

export class ConversationList {
  readonly element: HTMLElement;
  private readonly search = make("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.draw() });
  private readonly box = make("nav", { "aria-label": "Conversations" });
  private readonly file = make("input", { type: "file", accept: ".json", hidden: true, "aria-label": "Import conversations", onchange: () => void this.read() });
  private readonly exports = make("details", { class: "exports" });
  private all: Conversation[] = [];
  private now: Conversation | null = null;

  constructor(private readonly open: (one: Conversation) => void, private readonly remove: (one: Conversation) => void, private readonly imported: (added: Conversation[]) => void) {
    const act = (text: string, title: string, run: () => void): HTMLElement => button(text, run, { class: "small", title });
    this.exports.append(make("summary", {}, "Export and import"), make("div", {},
      act("This one as Markdown", "Write the conversation that is shown to a Markdown file", () => this.now && download(`${titleOf(this.now)}.md`, asMarkdown(this.now))),
      act("All as JSON", "Write all conversations to a file that can be imported", () => download("conversations.json", JSON.stringify(this.all, null, 1))),
      act("Import JSON…", "Add the conversations of such a file", () => this.file.click()), this.file));
    this.element = make("div", { class: "conversations" }, this.search, this.box, this.exports);
  }

  /** Show the conversations that match the search. now: the open conversation. */
  show(all: Conversation[], now: Conversation): void {
    this.all = all;
    this.now = now;
    this.search.hidden = all.length < 2 && !this.search.value;
    this.draw();
  }

  private draw(): void {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.all.filter((one) => matches(one, words));
    const items = found.map((one) => {
      const title = titleOf(one);
      const open = button(title, () => this.open(one), { class: "link", dir: "auto" });
      if (one.id === this.now?.id) open.setAttribute("aria-current", "true");
      return make("li", {}, open, button("×", () => this.remove(one), { class: "plain", "aria-label": `Delete ${title}` }));
    });
    const nothing = words.length ? "No conversation has these words." : "No conversations yet.";
    this.box.replaceChildren(items.length ? make("ul", {}, ...items) : make("p", { class: "quiet", role: "status" }, nothing));
  }

  private async read(): Promise<void> {
    const file = this.file.files?.[0];
    this.file.value = "";
    if (!file) return;
    const found = file.size <= MAX_IMPORT_BYTES ? parse(await file.text()) : [];
    if (found.length) this.imported(found);
    else say(`${file.name} holds no conversations. Choose a file that this page exported as JSON, of at most ${MAX_IMPORT_BYTES >> 20} MB.`);
  }
}

/** Return whether a conversation has all of the words, in its title or its messages. */
function matches(one: Conversation, words: string[]): boolean {
  if (!words.length) return true;
  const texts = [one.title, one.system, ...one.messages.map(({ content }) => content)].map((text) => text.toLowerCase());
  return words.every((word) => texts.some((text) => text.includes(word)));
}
