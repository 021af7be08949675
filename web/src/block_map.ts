// The KV blocks of one cache group on a canvas: a cell each, in its owner's colour. They stand in the
// pool's order, or grouped by owner without the free ones, which suits a large pool that is mostly empty.

import { button, calm, make } from "./dom";
import type { Group } from "./live";
import { onTheme } from "./theme";

const FREE = 0;
const CACHED = 1;
const PINNED = 3;
const HELD = 4;
const MAX_HEIGHT = 380;
const LARGEST = 22;
const SMALLEST = 3;
const WITH_COUNT = 13; // a cell this large has room for a number
const NEVER = -1;
const LAST = 2 ** 31; // the rank of blocks without an owner
const MANY = 1500; // blocks, from which they begin grouped
const FLASH_MS = 700;
const LIGHTNESS = [0.585, 0.5, 0.43]; // white numbers are read on all of them
const FLASHES: Record<string, string> = { hit: "#22c55e", copy: "#ec4899", swap_out: "#f97316", load: "#06b6d4" };

/** Return the colour of a request: neighbours in number are far apart in hue. */
export function colourOf(number: number): string {
  return number < 0 ? "var(--quiet)" : `oklch(${LIGHTNESS[number % 3] ?? 0.5} 0.135 ${((number * 137.508) % 360).toFixed(1)})`;
}

export class BlockMap {
  readonly element: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  readonly status = make("p", { class: "quiet", "aria-live": "polite" });
  private group: Group | null = null;
  private cell = LARGEST;
  private zoom = 0; // pixels added to a cell
  private columns = 1;
  private isGrouped: boolean;
  private order: number[] = []; // the blocks that are shown
  private looks = new Float64Array(0); // of each place: what was drawn there
  private size = ""; // of the canvas and its cells
  private places = new Int32Array(0); // of each block: its place in the order; -1 if it is not shown
  private readonly summary = make("span", { class: "quiet", hidden: true });
  private readonly layout = make("select", { "aria-label": "Order of the blocks", onchange: () => this.arrange(this.layout.value === "grouped") }, make("option", { value: "all" }, "all, in the pool's order"), make("option", { value: "grouped" }, "grouped by request, without free ones"));
  private cursor = -1;
  private chosen = -1; // the number of the request that stands out
  private readonly flashes = new Map<number, { kind: string; since: number }>();
  private frame = 0;
  private readonly styles = new Map<string, string>(); // of CSS variables

  /** pick: what to do with the owner of a block that was clicked. */
  constructor(private readonly name: string, title: string, num: number, private readonly pick: (owner: number) => void) {
    this.isGrouped = num >= MANY;
    this.layout.value = this.isGrouped ? "grouped" : "all";
    this.canvas = make("canvas", { tabindex: 0, role: "img", class: "map" });
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("click", (event) => this.open(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    const zoomed = (by: number) => () => {
      this.zoom = Math.max(SMALLEST - LARGEST, Math.min(LARGEST, this.zoom + by));
      this.show(this.group);
    };
    const tools = make("div", { class: "map-tools" }, make("h3", {}, title), this.layout, button("−", zoomed(-2), { class: "small", "aria-label": "Smaller cells" }), button("+", zoomed(2), { class: "small", "aria-label": "Larger cells" }));
    this.element = make("div", {}, tools, make("div", { class: "map-box" }, this.canvas), this.summary, this.status);
    new ResizeObserver(() => this.show(this.group)).observe(this.canvas);
    onTheme(() => {
      this.styles.clear();
      this.show(this.group);
    });
  }

  /** Draw all blocks. */
  show(group: Group | null): void {
    this.group = group;
    if (!group || !this.canvas.clientWidth) return;
    this.sort(group);
    this.size = "";
    this.fit();
    this.looks = new Float64Array(group.states.length).fill(NEVER);
    this.drawChanged();
  }

  /** Draw blocks that have changed. */
  change(blocks: number[]): void {
    if (!this.group || !this.canvas.clientWidth || !blocks.length) return;
    if (!this.isGrouped) {
      for (const block of blocks) this.draw(block);
      this.showStatus();
      return;
    }
    const before = this.order.length;
    this.sort(this.group);
    if (this.fit()) this.looks.fill(NEVER);
    const context = this.context();
    for (let place = this.order.length; place < before; place++) {
      context.clearRect((place % this.columns) * this.cell, Math.floor(place / this.columns) * this.cell, this.cell, this.cell);
      this.looks[place] = NEVER;
    }
    this.drawChanged();
  }

  /** Draw each place whose block looks different from the last one there. */
  private drawChanged(): void {
    this.order.forEach((block, place) => {
      const look = this.lookOf(block);
      if (look !== NEVER && look === this.looks[place]) return;
      this.looks[place] = look;
      this.draw(block);
    });
    this.showStatus();
  }

  /** Return a number for a block's look; NEVER if it must be drawn each time. */
  private lookOf(block: number): number {
    if (!this.group || this.flashes.has(block) || block === this.cursor) return NEVER;
    const { states, owners, sharers } = this.group;
    return (((owners[block] ?? -1) + 1) * 8 + (states[block] ?? 0)) * 128 + Math.min(127, sharers[block] ?? 0);
  }

  /** Choose the size of a cell, and give the canvas the size of all cells. Return whether it was cleared by that. */
  private fit(): boolean {
    const num = this.order.length;
    const width = this.canvas.clientWidth;
    this.cell = LARGEST;
    while (this.cell > SMALLEST && Math.ceil(num / Math.floor(width / this.cell)) * this.cell > MAX_HEIGHT) this.cell--;
    this.cell = Math.max(SMALLEST, Math.min(2 * LARGEST, this.cell + this.zoom));
    this.columns = Math.max(1, Math.floor(width / this.cell));
    const height = Math.max(1, Math.ceil(num / this.columns)) * this.cell;
    const scale = devicePixelRatio || 1;
    const size = [this.cell, width, height, scale].join();
    if (size === this.size) return false;
    this.size = size;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.context().scale(scale, scale);
    return true;
  }

  private arrange(isGrouped: boolean): void {
    this.isGrouped = isGrouped;
    this.show(this.group);
  }

  /** Choose the blocks that are shown, and their order: the requests' blocks first, then the others. */
  private sort({ states, owners }: Group): void {
    const num = states.length;
    const keys = new Float64Array(num);
    let numShown = 0;
    states.forEach((state, block) => {
      if (this.isGrouped && state === FREE) return;
      const owner = owners[block] ?? -1;
      const rank = this.isGrouped ? (owner < 0 ? LAST - state : owner) : 0;
      keys[numShown++] = rank * num + block;
    });
    this.order = Array.from(keys.subarray(0, numShown).sort(), (key) => key % num);
    this.places = new Int32Array(num).fill(-1);
    this.order.forEach((block, place) => { this.places[block] = place; });
    this.summary.hidden = !this.isGrouped;
    this.summary.textContent = this.isGrouped ? `${(num - numShown).toLocaleString("en")} of ${num.toLocaleString("en")} blocks are free` : "";
  }

  /** Let a block flash. */
  flash(block: number, kind: string): void {
    this.flashes.set(block, { kind, since: performance.now() });
    if (!this.frame) this.frame = requestAnimationFrame(() => this.fade());
  }

  /** Let the blocks of one request stand out; -1 none. */
  choose(number: number): void {
    if (number === this.chosen) return;
    this.chosen = number;
    this.group?.states.forEach((_, block) => this.draw(block));
  }

  private context(): CanvasRenderingContext2D {
    const context = this.canvas.getContext("2d");
    if (!context) throw new Error("no canvas");
    return context;
  }

  private style(name: string): string {
    const known = this.styles.get(name) ?? getComputedStyle(this.canvas).getPropertyValue(name).trim();
    this.styles.set(name, known);
    return known;
  }

  private draw(block: number): void {
    const group = this.group;
    const place = this.places[block] ?? -1;
    if (!group || place < 0) return;
    const context = this.context();
    const size = this.cell;
    const x = (place % this.columns) * size;
    const y = Math.floor(place / this.columns) * size;
    const gap = size > 6 ? 2 : size > 4 ? 1 : 0.5;
    const [state, owner, sharers] = [group.states[block] ?? 0, group.owners[block] ?? -1, group.sharers[block] ?? 0];
    context.clearRect(x, y, size, size);
    context.globalAlpha = this.chosen >= 0 && owner !== this.chosen ? 0.25 : 1;
    if (state === FREE) context.fillStyle = this.style("--free");
    else if (state === CACHED) context.fillStyle = this.style("--cached");
    else if (owner >= 0) context.fillStyle = colourOf(owner);
    else context.fillStyle = this.style(state === HELD ? "--cached" : "--pinned");
    context.fillRect(x, y, size - gap, size - gap);
    if (state >= PINNED) frame(context, x, y, size - gap, this.style(state === HELD ? "--held" : "--pinned"), 2);
    const flash = this.flashes.get(block);
    if (flash) {
      context.globalAlpha = calm.matches ? 1 : Math.max(0, 1 - (performance.now() - flash.since) / FLASH_MS);
      frame(context, x, y, size - gap, FLASHES[flash.kind] ?? "#fff", Math.max(2, size / 7));
    }
    context.globalAlpha = 1;
    if (sharers > 1) this.drawCount(context, x, y, size - gap, sharers);
    if (block === this.cursor) frame(context, x, y, size - gap, this.style("--text"), 2);
  }

  private drawCount(context: CanvasRenderingContext2D, x: number, y: number, size: number, sharers: number): void {
    context.fillStyle = "#fff";
    if (size >= WITH_COUNT) {
      context.font = `600 ${Math.round(size * 0.62)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(sharers > 99 ? "99" : String(sharers), x + size / 2, y + size / 2 + 0.5, size);
    } else {
      const dot = Math.max(1, size / 3);
      context.fillRect(x + (size - dot) / 2, y + (size - dot) / 2, dot, dot);
    }
  }

  private fade(): void {
    const now = performance.now();
    for (const [block, { since }] of this.flashes) {
      const isOver = now - since > FLASH_MS;
      if (isOver) this.flashes.delete(block);
      if (isOver || !calm.matches) this.draw(block);
    }
    this.frame = this.flashes.size ? requestAnimationFrame(() => this.fade()) : 0;
  }

  private at(event: MouseEvent): number {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const place = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column;
    return column < this.columns ? this.order[place] ?? -1 : -1;
  }

  private point(block: number): void {
    const before = this.cursor;
    if (block === before) return;
    this.cursor = block;
    this.draw(before);
    this.draw(block);
    this.status.textContent = this.describe(block);
  }

  private describe(block: number): string {
    const group = this.group;
    if (!group || block < 0) return "";
    const owner = group.owners[block] ?? -1;
    const sharers = group.sharers[block] ?? 0;
    const stateText = ["free", "cached by the prefix cache, not in use", "in use", "pinned", "held by a retained request"][group.states[block] ?? 0];
    const ownerText = owner < 0 ? "" : `, of request #${owner}`;
    return `Block ${block}: ${stateText}${ownerText}${sharers > 1 ? `, shared by ${sharers}` : ""}`;
  }

  private open(block: number): void {
    const owner = this.group?.owners[block] ?? -1;
    if (owner >= 0) this.pick(owner);
  }

  private press(event: KeyboardEvent): void {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    const at = this.places[this.cursor] ?? -1;
    if (step !== undefined && this.order.length) {
      const next = this.order[at < 0 ? 0 : at + step];
      if (next !== undefined) this.point(next);
    } else if (event.key === "Enter" && this.cursor >= 0) this.open(this.cursor);
    else if (event.key === "Escape") this.point(-1);
    else return;
    event.preventDefault();
  }

  private showStatus(): void {
    const counts = [0, 0, 0, 0, 0];
    let shared = 0;
    this.group?.states.forEach((state, block) => {
      counts[state] = (counts[state] ?? 0) + 1;
      if ((this.group?.sharers[block] ?? 0) > 1) shared++;
    });
    this.canvas.dataset["used"] = String(counts[2]);
    this.canvas.dataset["held"] = String(counts[HELD]);
    this.canvas.dataset["shared"] = String(shared);
    const label = `${this.name}: ${counts[2]} in use, ${shared} shared, ${counts[1]} cached, ${counts[3]} pinned, ${counts[4]} held, ${counts[0]} free. Use the arrow keys to move and Enter to show the owner.`;
    this.canvas.setAttribute("aria-label", label);
  }
}

/** Draw a frame inside of a cell, so that drawing the cell again removes all of it. */
function frame(context: CanvasRenderingContext2D, x: number, y: number, size: number, colour: string, width: number): void {
  const wide = Math.min(width, size / 2);
  context.strokeStyle = colour;
  context.lineWidth = wide;
  context.strokeRect(x + wide / 2, y + wide / 2, size - wide, size - wide);
}
