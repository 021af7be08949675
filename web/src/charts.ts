// Small charts on canvases: lines over the last minute, and the last steps as bars.

import { duration, make } from "./dom";
import type { Step } from "./live";
import { onTheme } from "./theme";

const SPAN_S = 60;
const MIN_SPAN_S = 10;
const MAX_JOINED_S = 5; // moments that are further apart are not joined by a line
const MAX_STEPS = 80;

export interface Line {
  name: string;
  colour: string; // of a CSS variable
}

/** A chart with its title and what it shows last, in words. */
class Chart {
  readonly element: HTMLElement;
  protected readonly canvas = make("canvas", { role: "img", class: "chart" });
  private readonly latest = make("span", { class: "latest" });

  constructor(private readonly title: string, legend: Line[]) {
    const keys = legend.map(({ name, colour }) => {
      const mark = make("i", { class: "mark" });
      mark.style.background = `var(${colour})`;
      return make("span", { class: "key" }, mark, name);
    });
    const head = make("figcaption", {}, make("b", {}, title), this.latest, make("span", { class: "keys" }, ...keys));
    this.element = make("figure", { class: "card" }, head, this.canvas);
    this.showValue("");
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    onTheme(() => this.draw());
  }

  draw(): void {}

  protected begin(): { context: CanvasRenderingContext2D; width: number; height: number } | null {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const context = this.canvas.getContext("2d");
    if (!width || !context) return null;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    context.scale(scale, scale);
    return { context, width, height };
  }

  protected colour(name: string): string {
    return getComputedStyle(this.canvas).getPropertyValue(name).trim();
  }

  protected showValue(text: string): void {
    if (this.latest.textContent === text && text) return;
    this.latest.textContent = text;
    this.canvas.setAttribute("aria-label", `${this.title}: ${text || "no data yet"}`);
  }

  /** Wipe out what was shown before. */
  protected showNothing(): void {
    this.draw();
    this.showValue("");
  }
}

export class Lines extends Chart {
  private readonly points: { at: number; values: number[] }[] = [];

  constructor(title: string, private readonly lines: Line[], private readonly write: (value: number) => string) {
    super(title, lines);
  }

  /** Add values at a time in seconds; NaN: unknown. A time before the last one belongs to another run, and clears the chart. */
  add(at: number, values: number[], isDrawn = true): void {
    if (at < (this.points.at(-1)?.at ?? at)) this.points.length = 0;
    this.points.push({ at, values });
    while ((this.points[0]?.at ?? at) < at - SPAN_S) this.points.shift();
    if (!isDrawn) return;
    this.draw();
    this.showValue(values.map((value) => this.write(value)).join(" · "));
  }

  clear(): void {
    this.points.length = 0;
    this.showNothing();
  }

  override draw(): void {
    const area = this.begin();
    const last = this.points.at(-1);
    if (!area || !last) return;
    const { context, width, height } = area;
    const span = Math.max(MIN_SPAN_S, last.at - (this.points[0]?.at ?? last.at));
    const known = this.points.flatMap((point) => point.values).filter(Number.isFinite);
    const highest = Math.max(0, ...known);
    const maxValue = highest * 1.1 || 1;
    axis(context, this.colour("--line"), width, [16, (height + 14) / 2, height - 2]);
    context.fillStyle = this.colour("--quiet");
    context.font = "11px system-ui, sans-serif";
    if (highest) context.fillText(this.write(maxValue), 0, 11);
    this.lines.forEach((line, i) => {
      context.strokeStyle = this.colour(line.colour);
      context.lineWidth = 2;
      context.beginPath();
      let before = -Infinity; // when the point was that the line has come to
      for (const { at, values } of this.points) {
        const value = values[i] ?? NaN;
        if (!Number.isFinite(value)) {
          before = -Infinity;
          continue;
        }
        const x = (width - 3) * (1 - (last.at - at) / span);
        const y = height - 2 - (height - 16) * (value / maxValue);
        if (at - before <= MAX_JOINED_S) context.lineTo(x, y);
        else {
          context.moveTo(x, y);
          context.lineTo(x + 2, y); // also a point that stands alone is seen
        }
        before = at;
      }
      context.stroke();
    });
  }
}

export class StepBars extends Chart {
  private steps: Step[] = [];

  constructor() {
    super("Steps", [
      { name: "prompts", colour: "--prefill" },
      { name: "decoding", colour: "--decode" },
      { name: "time", colour: "--cached" },
    ]);
  }

  /** Add steps; the width of a bar is even, its height the tokens of its step. */
  add(steps: Step[]): void {
    if (!steps.length) return;
    this.steps = [...this.steps, ...steps].slice(-MAX_STEPS);
    this.draw();
    const last = this.steps.at(-1);
    if (last) this.showValue(`${last.prefill_tokens} + ${last.decode_tokens} tokens in ${last.duration_ms.toFixed(1)} ms`);
  }

  clear(): void {
    this.steps = [];
    this.showNothing();
  }

  override draw(): void {
    const area = this.begin();
    if (!area) return;
    const { context, width, height } = area;
    const maxValue = Math.max(1, ...this.steps.map((step) => step.prefill_tokens + step.decode_tokens));
    const longest = Math.max(0.001, ...this.steps.map((step) => step.duration_ms));
    const wide = width / MAX_STEPS;
    const tall = (height - 18) * 0.68; // tokens above, times below
    const middle = 14 + tall;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = this.colour("--quiet");
    if (this.steps.length) context.fillText(`${maxValue} tokens, ${duration(longest)}`, 0, 10);
    axis(context, this.colour("--line"), width, [middle, height - 1]);
    this.steps.forEach((step, i) => {
      const x = i * wide;
      const decode = Math.max(step.decode_tokens ? 2 : 0, (tall * step.decode_tokens) / maxValue);
      const prefill = (tall * step.prefill_tokens) / maxValue;
      const time = Math.max(1, ((height - middle - 5) * step.duration_ms) / longest);
      const bar = (colour: string, y: number, size: number): void => {
        context.fillStyle = this.colour(colour);
        context.fillRect(x, y, Math.max(1, wide - 1), size);
      };
      bar("--decode", middle - decode, decode);
      bar("--prefill", middle - decode - prefill, prefill);
      bar("--cached", height - 1 - time, time);
    });
  }
}

/** Draw thin lines across. */
function axis(context: CanvasRenderingContext2D, colour: string, width: number, heights: number[]): void {
  context.fillStyle = colour;
  for (const y of heights) context.fillRect(0, Math.round(y), width, 1);
}
