// A model's answer as Markdown, parsed by `marked` and built as elements here. Whatever a model wrote
// goes in as text, never as HTML. A link opens only after a question.

import { Marked, type MarkedExtension, type Token, type Tokens } from "marked";
import { button, make } from "./dom";
import { GrowingText } from "./growing";
import { confirmLink } from "./link_dialog";
import { mathElement } from "./math";

const MAX_CHARS = 60_000; // a longer text is shown as it was written
const MAX_BLOCK_CHARS = 12_000; // of one block, such as a list or a table
const MAX_BLOCK_MARKS = 1500; // asterisks and underscores of a block
const MAX_HEADING = 6;

const MATH: [RegExp, boolean][] = [
  [/^\$\$([^$]+?)\$\$/, true],
  [/^\\\[([^]+?)\\\]/, true],
  [/^\\\(([^]+?)\\\)/, false],
  [/^\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)/, false],
];

interface MathToken extends Tokens.Generic {
  type: "math";
  text: string;
  isBlock: boolean;
}

function mathAt(source: string): MathToken | undefined {
  for (const [pattern, isBlock] of MATH) {
    const found = pattern.exec(source);
    if (found?.[1]?.trim()) return { type: "math", raw: found[0], text: found[1].trim(), isBlock };
  }
  return undefined;
}

const extension: MarkedExtension = {
  extensions: [{ name: "math", level: "inline", start: (source) => source.search(/\$|\\[([]/), tokenizer: mathAt }],
};
const marked = new Marked({ gfm: true }, extension);

/** A text in Markdown that grows while it is shown. Finished blocks are built once; only the last
 * one is built again in each frame. */
export class MarkdownText {
  private text = "";
  private frame = 0;
  private settled = 0; // characters whose elements are final
  private plain: GrowingText | null = null;
  private tail: Node[] = [];

  constructor(readonly element: HTMLElement, private readonly drawn: () => void = () => undefined) {
    element.classList.add("markdown");
  }

  add(text: string): void {
    if (this.plain) this.plain.add(text);
    else {
      this.text += text;
      if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
    }
  }

  /** Draw what is still waiting. */
  end(): void {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.plain?.end();
  }

  private draw(): void {
    this.frame = 0;
    if (this.plain || !this.text) return;
    if (this.text.length > MAX_CHARS) this.showPlain();
    else {
      try {
        this.build();
      } catch {
        this.showPlain(); // nested more deeply than the parser's stack
      }
    }
    this.drawn();
  }

  private build(): void {
    const rest = this.text.slice(this.settled);
    if (!rest) return;
    if (isHard(rest)) throw new Error("a block is too long");
    const tokens = marked.lexer(rest);
    const last = tokens.length - 1 - [...tokens].reverse().findIndex((token) => token.type !== "space");
    for (const node of this.tail) node.parentNode?.removeChild(node);
    tokens.forEach((token, i) => {
      const nodes = block(token);
      this.element.append(...nodes);
      if (i < last) this.settled += token.raw.length;
      else if (i === last) this.tail = nodes;
    });
  }

  private showPlain(): void {
    this.element.replaceChildren();
    this.element.classList.remove("markdown");
    this.plain = new GrowingText(this.element, this.drawn);
    this.plain.add(this.text);
    this.plain.end();
    this.text = "";
  }
}

/** Return whether a block could keep the parser busy, whose work can grow with the square of a block. */
function isHard(text: string): boolean {
  const blocks = text.split(/\n[ \t]*\n/);
  const isLong = (block: string): boolean => block.length > MAX_BLOCK_CHARS && !/^ {0,3}(```|~~~)/.test(block);
  return blocks.some((block) => isLong(block) || block.replace(/[^*_]+/g, "").length > MAX_BLOCK_MARKS);
}

// ---- blocks -----------------------------------------------------------------------------------------

function block(token: Token): Node[] {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "checkbox": {
      const isDone = (token as Tokens.Checkbox).checked;
      return [make("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "done" : "to do" }), new Text(" ")];
    }
    case "heading": {
      const level = Math.min(MAX_HEADING, (token as Tokens.Heading).depth + 2); // the page has h1 and h2
      return [make(`h${level}` as "h3", { dir: "auto" }, ...inline(token.tokens))];
    }
    case "hr":
      return [make("hr")];
    case "code":
      return [codeBlock(token as Tokens.Code)];
    case "blockquote":
      return [make("blockquote", {}, ...blocks(token.tokens))];
    case "list":
      return [list(token as Tokens.List)];
    case "table":
      return [table(token as Tokens.Table)];
    case "paragraph":
      return [make("p", { dir: "auto" }, ...inline(token.tokens))];
    case "text":
      return token.tokens ? inline(token.tokens) : [new Text(token.text as string)];
    default: // HTML stays as it was written
      return [make("p", { dir: "auto", class: "raw" }, token.raw.replace(/\n+$/, ""))];
  }
}

function blocks(tokens: Token[] = []): Node[] {
  return tokens.flatMap(block);
}

function codeBlock({ text, lang }: Tokens.Code): HTMLElement {
  const name = (lang ?? "").split(/\s/, 1)[0] ?? "";
  const copy = button("Copy", () => void copied(copy, text), { class: "small", "aria-label": "Copy the code" });
  return make("div", { class: "code-block", dir: "ltr" }, make("div", { class: "code-head" }, make("span", {}, name.slice(0, 40)), copy), make("pre", { tabindex: 0 }, make("code", {}, text)));
}

async function copied(by: HTMLButtonElement, text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    by.textContent = "Copied";
  } catch {
    by.textContent = "Not copied"; // no permission, or a page without HTTPS
  }
}

function list({ ordered, start, items }: Tokens.List): HTMLElement {
  const rows = items.map((item) => {
    const content = blocks(item.tokens);
    return make("li", { dir: "auto", class: item.task ? "task" : undefined }, ...content);
  });
  return ordered ? make("ol", { start: Number(start) || undefined }, ...rows) : make("ul", {}, ...rows);
}

function table({ header, rows, align }: Tokens.Table): HTMLElement {
  const cell = (tag: "th" | "td") => (each: Tokens.TableCell, i: number): HTMLElement => make(tag, { class: align[i] ?? undefined, dir: "auto" }, ...inline(each.tokens));
  const body = rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
  return make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table" }, make("table", {}, make("thead", {}, make("tr", {}, ...header.map(cell("th")))), make("tbody", {}, ...body)));
}

// ---- within a line ------------------------------------------------------------------------------------

function inline(tokens: Token[] = []): Node[] {
  return tokens.map(piece);
}

function piece(token: Token): Node {
  switch (token.type) {
    case "strong":
      return make("strong", {}, ...inline(token.tokens));
    case "em":
      return make("em", {}, ...inline(token.tokens));
    case "del":
      return make("del", {}, ...inline(token.tokens));
    case "codespan":
      return make("code", {}, token.text as string);
    case "br":
      return make("br");
    case "math":
      return mathElement((token as MathToken).text, (token as MathToken).isBlock);
    case "link":
      return link(token.href as string, inline(token.tokens), token.raw);
    case "image":
      return link(token.href as string, [new Text(`image: ${(token.text as string) || "without a name"}`)], token.raw);
    case "html":
      return /^<br\s*\/?>$/i.test(token.raw) ? make("br") : new Text(token.raw);
    default: {
      const { tokens, text, raw } = token as Tokens.Generic;
      return tokens ? fragment(inline(tokens)) : new Text((text as string | undefined) ?? raw);
    }
  }
}

function fragment(nodes: Node[]): DocumentFragment {
  const made = new DocumentFragment();
  made.append(...nodes);
  return made;
}

/** Make a link that asks before it opens. Other schemes than http, https and mailto stay text. */
function link(href: string, children: Node[], raw: string): Node {
  const url = /^(https?:|mailto:)/i.test(href) && URL.canParse(href) ? href : null;
  if (!url) return new Text(raw);
  return make("button", { type: "button", role: "link", class: "outside", title: url, onclick: () => confirmLink(url) }, ...children);
}
