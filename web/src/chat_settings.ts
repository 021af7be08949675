// A chat's settings: system prompt, parameters, tools, and structured output.

import type { Conversation } from "./conversations";
import { button, field, make } from "./dom";
import { Parameters } from "./parameters";

const TOOLS_EXAMPLE = `[{"type": "function", "function": {
  "name": "weather",
  "description": "The weather of a place",
  "parameters": {"type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"]}}}]`;
const SCHEMA_EXAMPLE = `{"type": "object",
  "properties": {"title": {"type": "string"}},
  "required": ["title"]}`;

/** A box for JSON, which says when it holds none. */
class JsonBox {
  readonly box: HTMLTextAreaElement;
  readonly element: HTMLElement;
  private readonly problem = make("span", { class: "bad", role: "status" });

  constructor(label: string, example: string, private readonly check: (value: unknown) => string, changed: () => void) {
    this.box = make("textarea", { rows: 5, placeholder: example, spellcheck: "false", class: "code", onchange: changed, oninput: () => this.showProblem() });
    this.element = make("div", {}, field(label, this.box), this.problem);
  }

  /** Return what it holds; undefined if that is nothing, or no JSON of the kind. */
  get value(): unknown {
    return this.showProblem() ? undefined : this.box.value.trim() ? JSON.parse(this.box.value) : undefined;
  }

  set text(text: string) {
    this.box.value = text;
    this.showProblem();
  }

  /** Say what is wrong, and return it. */
  showProblem(): string {
    const problem = this.problemOf(this.box.value.trim());
    this.problem.textContent = problem;
    this.box.toggleAttribute("aria-invalid", Boolean(problem));
    return problem;
  }

  private problemOf(text: string): string {
    if (!text) return "";
    try {
      return this.check(JSON.parse(text));
    } catch (error) {
      return error instanceof SyntaxError ? `invalid JSON: ${error.message}` : String(error);
    }
  }
}

export class ChatSettings {
  readonly element: HTMLElement;
  private readonly system = make("textarea", { rows: 3, placeholder: "none", dir: "auto", onchange: () => this.keep() });
  readonly parameters = new Parameters("quire.chat.parameters");
  private readonly choice = make("select", {}, ...["auto", "required", "none"].map((name) => make("option", {}, name)));
  private readonly tools = new JsonBox("Tools (JSON list)", TOOLS_EXAMPLE, (value) => (Array.isArray(value) ? "" : "it must be a list of tools"), () => this.keep());
  private readonly schema = new JsonBox("JSON schema", SCHEMA_EXAMPLE, (value) => (typeof value === "object" && value !== null && !Array.isArray(value) ? "" : "a schema must be a JSON object"), () => this.keep());
  private of: Conversation | null = null;

  constructor(private readonly kept: () => void, close: () => void) {
    const part = (title: string, isOpen: boolean, ...children: HTMLElement[]): HTMLElement => make("details", { open: isOpen }, make("summary", {}, title), ...children);
    this.element = make("aside", { class: "settings", "aria-label": "Settings", id: "chat-settings" },
      make("header", {}, make("h2", {}, "Settings"), button("×", close, { class: "plain", "aria-label": "Close settings" })),
      part("System prompt", true, field("Sent before the first message", this.system)),
      part("Parameters", true, this.parameters.element),
      part("Tools", false, this.tools.element, field("Tool choice", this.choice), make("p", { class: "quiet" }, "Tool calls appear in the chat. Enter the result of a tool, and the model continues.")),
      part("Structured output", false, this.schema.element, make("p", { class: "quiet" }, "The answer is always JSON that matches this schema.")));
  }

  /** Show the settings of a conversation. */
  open(conversation: Conversation): void {
    this.of = conversation;
    this.system.value = conversation.system;
    this.tools.text = conversation.tools;
    this.schema.text = conversation.schema;
  }

  /** Say what keeps a request from being sent; nothing if it can. */
  get problem(): string {
    const problems = [["tools", this.tools.showProblem()], ["JSON schema", this.schema.showProblem()]];
    return problems.filter(([, problem]) => problem).map(([name, problem]) => `Correct ${name} in the settings: ${problem}.`).join(" ");
  }

  /** Return the fields of a request other than its messages. */
  get requestFields(): object {
    this.keep();
    const tools = this.tools.value as unknown[] | undefined;
    const schema = this.schema.value;
    return {
      ...this.parameters.values,
      ...(tools?.length ? { tools, tool_choice: this.choice.value } : {}),
      ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } } : {}),
    };
  }

  private keep(): void {
    if (!this.of) return;
    this.of.system = this.system.value;
    this.of.tools = this.tools.box.value;
    this.of.schema = this.schema.box.value;
    this.kept();
  }
}
