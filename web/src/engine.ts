// The Engine view: blocks, queue, rows, steps and times, live or of a recording.

import { BlockMap } from "./block_map";
import { Lines, StepBars } from "./charts";
import { button, byId, duration, field, make, say, short } from "./dom";
import { heldRow, pinnedRow, runningRow, waitingRow, type Links } from "./engine_rows";
import { readFrames, type Before } from "./frames_file";
import { Latency } from "./latency";
import { ListCard } from "./list_card";
import { Live, type Snapshot, type Step, type Update } from "./live";
import { Player } from "./player";
import { messageOf } from "./server";
import { StoryDialog } from "./story";

const METRICS_MS = 2000;
const RATE_S = 2; // over which throughput is counted
const KINDS: Record<string, string> = { full: "full attention", window: "sliding window", state: "states" };
const TILES = ["Running", "Waiting", "Blocks used", "Output", "Prompts", "Host memory"] as const;
const COUNTED: [string, string][] = [
  ["hit", "hits"], ["copy", "copies"], ["swap_out", "swapped out"], ["load", "loaded"], ["eviction", "evicted"], ["preemption", "preemptions"],
];

export class EngineView {
  private readonly root = byId("engine");
  private readonly notice = make("p", { class: "notice", role: "status", hidden: true });
  private readonly bar = make("div", { class: "engine-bar" });
  private readonly tiles = new Map<string, HTMLElement>();
  private readonly mapsBox = make("div", { class: "maps" });
  private maps: BlockMap[] = [];
  private readonly counts = new Map<string, { num: number; shown: HTMLElement }>();
  private readonly running = new ListCard("Running", ["Request", "Progress", "Prompt", "Output", "Cached", "Blocks"]);
  private readonly waiting = new ListCard("Queue", ["Request", "Tokens", "Waiting", "Reason", "Preempted"], 2);
  private readonly pinned = new ListCard("Pinned", ["Prefix", "Tokens", "Blocks", "Hits"]);
  private readonly held = new ListCard("Retained", ["Request", "Tokens", "Blocks", "Expires in"]);
  private readonly throughput = new Lines(
    "Throughput",
    [{ name: "output", colour: "--decode" }, { name: "prompts", colour: "--prefill" }],
    (value) => `${short(value)} tok/s`,
  );
  private readonly firsts = new Lines("Time to first token", [{ name: "mean", colour: "--prefill" }], duration);
  private readonly nexts = new Lines("Time per token", [{ name: "mean", colour: "--decode" }], duration);
  private readonly bars = new StepBars();
  private readonly core = make("select", { onchange: () => this.live.choose(Number(this.core.value)) });
  private readonly coreField = field("Core", this.core);
  private readonly file = make("input", { type: "file", accept: ".jsonl,.gz,.json,.txt", hidden: true, onchange: () => void this.openFile() });
  private readonly story = new StoryDialog();
  private readonly latency = new Latency();
  private readonly live: Live;
  private readonly owners = new Map<number, string>(); // the ids of requests, by number
  private readonly links: Links = {
    showStory: (id) => void this.story.show(id),
    choose: (number) => this.maps.forEach((map) => map.choose(number)),
  };
  private player: Player | null = null;
  private isShown = false;
  private steps: { at: number; read: number; written: number }[] = [];
  private timer = 0;
  private state: Snapshot | null = null;

  /** model: whose engine is shown. */
  constructor(model: () => string | undefined) {
    this.live = new Live({ update: (update) => this.update(update), away: (why) => this.away(why), refused: (why) => this.refused(why) }, model);
    const tiles = make("div", { class: "tiles card" });
    for (const name of TILES) {
      const shown = make("strong", {}, "–");
      tiles.append(make("div", { class: "tile" }, make("span", {}, name), shown));
      this.tiles.set(name, shown);
    }
    const counts = make("p", { class: "counts" });
    for (const [kind, name] of COUNTED) {
      const shown = make("b", {}, "0");
      this.counts.set(kind, { num: 0, shown });
      counts.append(make("span", { class: "key" }, make("i", { class: `mark ${kind}` }), shown, ` ${name}`));
    }
    const charts = [this.throughput, this.bars, this.firsts, this.nexts].map((chart) => chart.element);
    const head = make("div", { class: "row" }, make("h2", {}, "KV blocks"), this.coreField);
    this.root.append(
      this.bar, this.notice, tiles,
      make("section", { class: "card map-card", "aria-label": "KV blocks" }, head, this.mapsBox, make("div", { class: "under" }, counts, legend())),
      make("div", { class: "charts" }, ...charts),
      make("div", { class: "lists" }, ...[this.running, this.waiting, this.pinned, this.held].map((list) => list.element)),
      this.story.element,
    );
    this.showBar();
  }

  /** Look at another model's engine. */
  changeModel(): void {
    this.live.choose(0);
    this.show(this.isShown);
  }

  /** Begin or end to look: without a look the engine makes nothing. */
  show(isShown: boolean): void {
    this.isShown = isShown;
    if (!isShown) this.player?.pause();
    const shouldRun = isShown && !this.player;
    if (shouldRun === this.live.isOn) return;
    clearInterval(this.timer);
    if (!shouldRun) {
      this.live.stop();
      return;
    }
    this.live.start();
    this.latency.forget();
    this.timer = window.setInterval(() => void this.readTimes(), METRICS_MS);
    void this.readTimes();
  }

  // ---- a recording --------------------------------------------------------------------------------

  private showBar(): void {
    const open = button("Open a recording…", () => this.file.click(), { title: "A file made by `quire playback`; it is read in this browser" });
    this.bar.replaceChildren(this.player ? this.player.element : make("div", { class: "row" }, make("span", { class: "quiet" }, "Live while this view is open"), this.file, open));
  }

  private async openFile(): Promise<void> {
    const file = this.file.files?.[0];
    say("");
    this.file.value = "";
    if (!file) return;
    try {
      const frames = await readFrames(file);
      this.player = null;
      this.live.stop();
      clearInterval(this.timer);
      this.story.recorded = frames.stories;
      this.state = null;
      this.player = new Player(frames, {
        update: (update) => this.update(update),
        jump: (update, before) => this.jump(update, before),
        close: () => this.closeRecording(),
      });
      this.showBar();
      this.bar.querySelector<HTMLElement>(".play")?.focus();
    } catch (error) {
      this.closeRecording();
      say(error instanceof Error ? error.message : messageOf(error));
    }
  }

  private closeRecording(): void {
    this.player = null;
    this.story.recorded = null;
    this.state = null;
    this.showBar();
    this.bar.querySelector<HTMLElement>("button")?.focus();
    this.show(this.isShown);
  }

  private jump(update: Update, before: Before): void {
    this.begin(update.state);
    for (const { at_s, steps, times } of before) {
      this.count(steps);
      this.throughput.add(at_s, this.rates(at_s), false);
      this.addTimes(at_s, times);
    }
    this.bars.add(before.flatMap(({ steps }) => steps));
    this.update(update);
  }

  // ---- what is shown --------------------------------------------------------------------------------

  private showNotice(text: string): void {
    this.notice.hidden = !text;
    this.notice.textContent = text;
  }

  private away(why: string): void {
    this.showNotice(`${why.charAt(0).toUpperCase()}${why.slice(1).replace(/\.$/, "")}. The last known state is shown; updates resume when the engine is back.`);
    this.root.classList.add("stale");
  }

  private refused(why: string): void {
    clearInterval(this.timer);
    this.showNotice(`${why} You can enter another key above, or open a recording without a key.`);
    this.root.classList.add("stale");
  }

  private update({ state, blocks, events, counts, steps, times }: Update): void {
    const isNew = state !== this.state;
    if (isNew) this.begin(state);
    this.showNotice("");
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
    this.count(isNew ? [] : steps);
    this.throughput.add(state.at_s, this.rates(state.at_s));
    if (times) this.addTimes(state.at_s, times);
    this.showTiles(state);
    for (const row of [...state.running, ...state.waiting]) if (row.id) this.owners.set(row.number, row.id);
    while (this.owners.size > 4096) this.owners.delete(this.owners.keys().next().value ?? 0);
    this.showLists(state);
  }

  private showLists(state: Snapshot): void {
    this.pinned.element.hidden = !state.pinned.length;
    this.held.element.hidden = !state.num_held;
    this.running.show(state.running.map((row) => runningRow(row, this.links)), state.num_running, "No requests running");
    this.waiting.show(state.waiting.map((row) => waitingRow(row, state, this.links)), state.num_waiting, "No requests waiting");
    this.pinned.show(state.pinned.map(pinnedRow), state.pinned.length);
    this.held.show(state.held.map((row) => heldRow(row, state.at_s, this.links)), state.num_held);
  }

  private begin(state: Snapshot): void {
    this.state = state;
    this.steps = [];
    for (const count of this.counts.values()) count.shown.textContent = String((count.num = 0));
    for (const chart of [this.bars, this.throughput, this.firsts, this.nexts]) chart.clear();
    this.mapsBox.replaceChildren();
    this.maps = state.groups.map((group) => {
      const name = KINDS[group.kind] ?? group.kind;
      const num = group.states.length;
      const map = new BlockMap(name, `${name}: ${num.toLocaleString("en")} blocks of ${state.block_size} tokens`, num, (owner) => this.pick(owner));
      this.mapsBox.append(map.element);
      map.show(group);
      return map;
    });
    this.coreField.hidden = state.num_cores < 2 || this.player !== null;
    const options = Array.from({ length: state.num_cores }, (_, core) => make("option", { value: core, selected: core === state.core }, String(core)));
    this.core.replaceChildren(...options);
  }

  private count(steps: Step[]): void {
    for (const step of steps) this.steps.push({ at: step.at_s, read: step.prefill_tokens, written: step.sampled_tokens });
  }

  /** Add mean times; without new values for a short while there is no point, and the line continues. */
  private addTimes(at: number, [first, next]: [first: number, next: number]): void {
    if (Number.isFinite(first)) this.firsts.add(at, [first]);
    if (Number.isFinite(next)) this.nexts.add(at, [next]);
  }

  /** Return tokens a second of the last moments: written, and read of prompts. */
  private rates(now: number): [written: number, read: number] {
    this.steps = this.steps.filter((step) => step.at > now - RATE_S);
    const written = this.steps.reduce((sum, step) => sum + step.written, 0) / RATE_S;
    return [written, this.steps.reduce((sum, step) => sum + step.read, 0) / RATE_S];
  }

  private showTiles(state: Snapshot): void {
    const [written, read] = this.rates(state.at_s);
    const used = Math.max(...state.groups.map((group) => group.states.filter((one) => one >= 2).length / group.states.length));
    const { num_blocks, num_swapped, num_cached } = state.host;
    this.tile("Running", `${state.num_running} of ${state.num_rows}`);
    this.tile("Waiting", String(state.num_waiting));
    this.tile("Blocks used", `${(100 * used).toFixed(1)} %`);
    this.tile("Output", `${short(written)} tok/s`);
    this.tile("Prompts", `${short(read)} tok/s`);
    this.tile("Host memory", num_blocks ? `${(num_swapped + num_cached).toLocaleString("en")} of ${num_blocks.toLocaleString("en")}` : "none");
    if (num_blocks) this.tiles.get("Host memory")?.setAttribute("title", `host memory: ${num_swapped} blocks of preempted sequences, ${num_cached} of cached prefixes`);
  }

  private tile(name: (typeof TILES)[number], text: string): void {
    const tile = this.tiles.get(name);
    if (tile && tile.textContent !== text) tile.textContent = text;
  }

  private pick(number: number): void {
    const id = this.owners.get(number);
    if (id) void this.story.show(id);
  }

  private async readTimes(): Promise<void> {
    try {
      const [first, next] = await this.latency.read();
      this.firsts.add(performance.now() / 1000, [first]);
      this.nexts.add(performance.now() / 1000, [next]);
    } catch {
      // the stream says that the engine is away
    }
  }
}

function legend(): HTMLElement {
  const keys: [string, string][] = [["free", "free"], ["cached", "cached"], ["used", "in use, one colour per request"], ["shared", "shared, with the number of owners"], ["pinned", "pinned"], ["held", "retained"]];
  return make("p", { class: "legend" }, ...keys.map(([name, text]) => make("span", { class: "key" }, make("i", { class: `mark ${name}` }, name === "shared" ? "3" : ""), text)));
}
