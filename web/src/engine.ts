// The Engine view: blocks, queue, rows, steps and times, and the story of a request.

import { BlockMap, colourOf } from "./block_map";
import { Lines, StepBars } from "./charts";
import { button, byId, duration, field, make, short } from "./dom";
import { KeyedRows, type Row } from "./keyed_rows";
import { Live, type Running, type Snapshot, type Update, type Waiting } from "./live";
import { ask, askJson, messageOf } from "./server";

const METRICS_MS = 2000;
const RATE_S = 2; // over which throughput is counted
const KINDS: Record<string, string> = { full: "full attention", window: "sliding window", state: "states" };
const COUNTED: [string, string][] = [
  ["hit", "hits"], ["copy", "copies"], ["swap_out", "swapped out"], ["load", "loaded"], ["eviction", "evicted"], ["preemption", "preemptions"],
];

type Times = Record<"first" | "next", { sum: number; count: number }>;

export class EngineView {
  private readonly root = byId("engine");
  private readonly notice = make("p", { class: "notice", role: "status", hidden: true });
  private readonly tiles = new Map<string, HTMLElement>();
  private readonly mapsBox = make("div", { class: "maps" });
  private maps: BlockMap[] = [];
  private readonly counts = new Map<string, { num: number; shown: HTMLElement }>();
  private readonly running = new KeyedRows(make("tbody"), 6);
  private readonly waiting = new KeyedRows(make("tbody"), 4, 1);
  private readonly throughput = new Lines(
    "Throughput",
    [{ name: "written", colour: "--decode" }, { name: "prompts read", colour: "--prefill" }],
    (value) => `${short(value)} tok/s`,
  );
  private readonly firsts = new Lines("Time to first token", [{ name: "mean", colour: "--prefill" }], duration);
  private readonly nexts = new Lines("Time per token", [{ name: "mean", colour: "--decode" }], duration);
  private readonly bars = new StepBars();
  private readonly core = make("select", { onchange: () => this.live.choose(Number(this.core.value)) });
  private readonly coreField = field("Core", this.core);
  private readonly story = make("dialog", { class: "story", "aria-label": "What happened to a request" });
  private readonly live = new Live({ update: (update) => this.update(update), away: (why) => this.away(why), refused: (why) => this.refused(why) });
  private readonly owners = new Map<number, string>(); // the ids of requests, by number
  private steps: { at: number; read: number; written: number }[] = [];
  private times: Times | null = null;
  private timer = 0;
  private state: Snapshot | null = null;

  constructor() {
    const tiles = make("div", { class: "tiles" });
    for (const name of ["Running", "Waiting", "Blocks used", "Written", "Prompts read"]) {
      const value = make("strong", {}, "–");
      this.tiles.set(name, value);
      tiles.append(make("div", { class: "tile" }, make("span", {}, name), value));
    }
    const counts = make("p", { class: "counts" });
    for (const [kind, name] of COUNTED) {
      const shown = make("b", {}, "0");
      this.counts.set(kind, { num: 0, shown });
      counts.append(make("span", { class: `count ${kind}` }, shown, ` ${name}`));
    }
    this.coreField.hidden = true;
    const charts = [this.throughput, this.bars, this.firsts, this.nexts].map((chart) => chart.element);
    this.root.append(
      this.notice, tiles,
      make("section", { class: "card", "aria-label": "KV blocks" }, make("div", { class: "row" }, make("h2", {}, "KV blocks"), this.coreField), this.mapsBox, counts, legend()),
      make("div", { class: "charts" }, ...charts),
      make("div", { class: "lists" },
        list("Running", ["Request", "Progress", "Prompt", "Written", "Cached", "Blocks"], this.running.body),
        list("Queue", ["Request", "Tokens", "Waits because", "Preempted"], this.waiting.body)),
      this.story,
    );
    this.story.addEventListener("click", (event) => event.target === this.story && this.story.close());
  }

  /** Begin or end to look: without a look the engine makes nothing. */
  show(isShown: boolean): void {
    if (isShown === this.live.isOn) return;
    clearInterval(this.timer);
    if (!isShown) {
      this.live.stop();
      return;
    }
    this.live.start();
    this.times = null;
    this.timer = window.setInterval(() => void this.readTimes(), METRICS_MS);
    void this.readTimes();
  }

  private away(why: string): void {
    this.notice.hidden = false;
    this.notice.textContent = `${why.replace(/\.$/, "")}. What is shown is the last that is known; it goes on by itself when the engine is back.`;
    this.root.classList.add("stale");
  }

  private refused(why: string): void {
    clearInterval(this.timer);
    this.notice.hidden = false;
    this.notice.textContent = `${why} Another key can be given above.`;
    this.root.classList.add("stale");
  }

  private update({ state, blocks, events, counts, steps }: Update): void {
    const isNew = state !== this.state;
    if (isNew) this.begin(state);
    this.notice.hidden = true;
    this.root.classList.remove("stale");
    blocks.forEach((changed, g) => {
      const map = this.maps[g];
      if (changed === null) map?.show(state.groups[g] ?? null);
      else map?.change(changed);
    });
    for (const [kind, group, block] of events) this.maps[group]?.flash(block, kind);
    for (const [kind, num] of Object.entries(counts)) {
      const count = this.counts.get(kind);
      if (count) count.shown.textContent = short((count.num += num));
    }
    this.bars.add(steps);
    this.rate(state, isNew ? [] : steps);
    for (const row of [...state.running, ...state.waiting]) this.owners.set(row.number, row.id);
    while (this.owners.size > 4096) this.owners.delete(this.owners.keys().next().value ?? 0);
    const more = state.num_waiting - state.waiting.length;
    this.running.show(state.running.map((row) => this.runningRow(row)), state.running.length ? "" : "nobody runs");
    this.waiting.show(state.waiting.map((row) => this.waitingRow(row, state)), more > 0 ? `and ${more} more` : state.num_waiting ? "" : "nobody waits");
  }

  private begin(state: Snapshot): void {
    this.state = state;
    this.steps = [];
    for (const chart of [this.bars, this.throughput, this.firsts, this.nexts]) chart.clear();
    this.mapsBox.replaceChildren();
    this.maps = state.groups.map((group) => {
      const name = KINDS[group.kind] ?? group.kind;
      const map = new BlockMap(name, (owner) => this.pick(owner));
      const title = make("h3", {}, `${name}: ${group.states.length.toLocaleString("en")} blocks of ${state.block_size} tokens`);
      this.mapsBox.append(make("div", {}, title, map.canvas, map.said));
      return map;
    });
    this.coreField.hidden = state.num_cores < 2;
    const options = Array.from({ length: state.num_cores }, (_, core) => make("option", { value: core, selected: core === state.core }, String(core)));
    this.core.replaceChildren(...options);
  }

  private rate(state: Snapshot, steps: Update["steps"]): void {
    for (const step of steps) this.steps.push({ at: step.at_s, read: step.prefill_tokens, written: step.sampled_tokens });
    this.steps = this.steps.filter((step) => step.at > state.at_s - RATE_S);
    const written = this.steps.reduce((sum, step) => sum + step.written, 0) / RATE_S;
    const read = this.steps.reduce((sum, step) => sum + step.read, 0) / RATE_S;
    this.throughput.add(state.at_s, [written, read]);
    const used = Math.max(...state.groups.map((group) => group.states.filter((one) => one >= 2).length / group.states.length));
    this.tile("Running", `${state.running.length} of ${state.num_rows}`);
    this.tile("Waiting", String(state.num_waiting));
    this.tile("Blocks used", `${(100 * used).toFixed(1)} %`);
    this.tile("Written", `${short(written)} tok/s`);
    this.tile("Prompts read", `${short(read)} tok/s`);
  }

  private tile(name: string, text: string): void {
    const tile = this.tiles.get(name);
    if (tile && tile.textContent !== text) tile.textContent = text;
  }

  private runningRow(row: Running): Row {
    const computed = Math.min(row.num_computed_tokens, row.num_prompt_tokens);
    const written = Math.max(0, row.num_known_tokens - row.num_prompt_tokens);
    const isPrompt = computed < row.num_prompt_tokens;
    const share = isPrompt ? computed / row.num_prompt_tokens : written / Math.max(1, row.limit - row.num_prompt_tokens);
    const prompt = isPrompt ? `${computed} / ${row.num_prompt_tokens}` : String(row.num_prompt_tokens);
    const cells = [Math.min(1, share), prompt, String(written), String(row.num_cached_tokens), String(row.num_blocks)];
    return { key: `${row.id} ${row.index}`, first: () => this.link(row), cells, isPrompt };
  }

  private waitingRow(row: Waiting, state: Snapshot): Row {
    const reason = state.reasons[row.reason] ?? row.reason;
    const cells = [String(row.num_known_tokens), row.is_swapped ? `in host memory; ${reason}` : reason, String(row.num_preemptions)];
    return { key: `${row.id} ${row.index}`, first: () => this.link(row), cells };
  }

  private link(row: Running | Waiting): HTMLElement {
    const mark = make("i", { class: "mark" });
    mark.style.background = colourOf(row.number);
    const name = `#${row.number}${row.index ? `.${row.index}` : ""}`;
    const stands = (number: number) => () => this.maps.forEach((map) => map.choose(number));
    const link = button(name, () => void this.tell(row.id), { class: "link", title: row.id });
    link.prepend(mark);
    link.addEventListener("pointerenter", stands(row.number));
    link.addEventListener("pointerleave", stands(-1));
    return link;
  }

  private pick(number: number): void {
    const id = this.owners.get(number);
    if (id) void this.tell(id);
  }

  /** Show what happened to a request. */
  private async tell(id: string): Promise<void> {
    const close = button("Close", () => this.story.close());
    const body = make("div", {}, "...");
    this.story.replaceChildren(make("h2", {}, id), body, close);
    if (!this.story.open) this.story.showModal();
    try {
      body.replaceChildren(shownStory(await askJson<Story>(`v1/requests/${encodeURIComponent(id)}`)));
    } catch (error) {
      body.textContent = messageOf(error);
    }
  }

  /** Mean times since the last look, from the sums and counts of /metrics. */
  private async readTimes(): Promise<void> {
    try {
      const now = timesIn(await (await ask("metrics")).text());
      const mean = (kind: "first" | "next"): number => {
        const [old, young] = [this.times?.[kind], now[kind]];
        return old && young.count > old.count ? (1000 * (young.sum - old.sum)) / (young.count - old.count) : NaN;
      };
      this.firsts.add(performance.now() / 1000, [mean("first")]);
      this.nexts.add(performance.now() / 1000, [mean("next")]);
      this.times = now;
    } catch {
      this.times = null; // the stream says that the engine is away
    }
  }
}

/** Find sums and counts of two histograms in Prometheus' text, over all cores. */
export function timesIn(text: string): Times {
  const times: Times = { first: { sum: 0, count: 0 }, next: { sum: 0, count: 0 } };
  for (const [, name, what, value] of text.matchAll(/^\w+:(time_to_first_token|inter_token_latency)_seconds_(sum|count)(?:\{.*\})? (\S+)$/gm)) {
    times[name === "time_to_first_token" ? "first" : "next"][what as "sum" | "count"] += Number(value);
  }
  return times;
}

function list(title: string, columns: string[], body: HTMLElement): HTMLElement {
  const head = make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)));
  const table = make("table", {}, make("thead", {}, head), body);
  return make("section", { class: "card", "aria-label": title }, make("h2", {}, title), make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": `${title}, a table` }, table));
}

function legend(): HTMLElement {
  const keys: [string, string][] = [["free", "free"], ["cached", "cached"], ["used", "in use, a colour for each request; a number or a dot: shared"], ["pinned", "pinned"], ["hit", "hit"], ["copy", "copied"], ["swap_out", "swapped out"], ["load", "loaded"]];
  return make("p", { class: "legend" }, ...keys.map(([name, text]) => make("span", { class: "key" }, make("i", { class: `mark ${name}` }), text)));
}

interface Story {
  data?: Story[];
  in_words: string[];
}

/** Show a timeline: in words, and all that is known. */
function shownStory(story: Story): HTMLElement {
  if (story.data) return make("div", {}, ...story.data.map(shownStory));
  const lines = story.in_words.map((line) => make("li", {}, line));
  const known = { ...story, in_words: undefined };
  const all = make("details", {}, make("summary", {}, "All that is known"), make("pre", { tabindex: 0 }, JSON.stringify(known, null, 1)));
  return make("div", {}, make("ol", {}, ...lines), all);
}
