// The story of a request: what happened to it, in words, in a dialog.

import { button, make } from "./dom";
import { requestJson, messageOf } from "./server";

interface Story {
  data?: Story[];
  in_words: string[];
}

export class StoryDialog {
  readonly element = make("dialog", { class: "story", "aria-label": "What happened to a request" });
  /** Of the requests of a recording, by id; null: the server is asked. */
  recorded: Record<string, string[]> | null = null;

  constructor() {
    this.element.addEventListener("click", (event) => event.target === this.element && this.element.close());
  }

  async show(id: string): Promise<void> {
    const body = make("div", {}, make("p", { class: "quiet" }, "loading …"));
    const close = button("Close", () => this.element.close());
    this.element.replaceChildren(make("h2", {}, "Request ", make("bdi", { class: "code" }, id)), body, make("div", { class: "row" }, make("span", {}), close));
    if (!this.element.open) this.element.showModal();
    try {
      body.replaceChildren(this.recorded ? inWords(this.recorded[id] ?? this.recorded[`${id}-0`] ?? ["The recording has no details of this request."]) : shown(await requestJson<Story>(`v1/requests/${encodeURIComponent(id)}`)));
    } catch (error) {
      body.replaceChildren(make("p", { class: "bad" }, messageOf(error)));
    }
  }
}

function inWords(lines: string[]): HTMLElement {
  return make("ol", {}, ...lines.map((line) => make("li", {}, line)));
}

/** Show a timeline: in words, and all that is known. */
function shown(story: Story): HTMLElement {
  if (story.data) return make("div", {}, ...story.data.map(shown));
  const known = { ...story, in_words: undefined };
  const all = make("details", {}, make("summary", {}, "All details"), make("pre", { tabindex: 0 }, JSON.stringify(known, null, 1)));
  return make("div", {}, inWords(story.in_words), all);
}
