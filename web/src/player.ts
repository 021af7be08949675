// Plays a recording: a slider, play and pause, a speed; by mouse and by keyboard.

import { button, make } from "./dom";
import type { Before, FramesFile } from "./frames_file";
import type { Update } from "./live";

const SPEEDS = [0.25, 0.5, 1, 2, 5, 10, 50];
const MAX_GAP_S = 1; // maximum pause between frames; longer ones are shortened to this

export interface Stage {
  /** Show what has changed. */
  update(update: Update): void;
  /** Show all of a moment, and in charts what was before it. */
  jump(update: Update, before: Before): void;
  close(): void;
}

export class Player {
  readonly element: HTMLElement;
  private readonly slider = make("input", { type: "range", min: 0, step: 1, "aria-label": "Position in the recording", oninput: () => this.seek(this.slider.valueAsNumber) });
  private readonly time = make("output", { class: "number" });
  private readonly play = button("Play", () => this.toggle(), { class: "main play" });
  private readonly speed = make("select", { "aria-label": "Speed" }, ...SPEEDS.map((speed) => make("option", { value: speed, selected: speed === 1 }, `${speed} ×`)));
  private at = 0;
  private frame = 0;
  private last = 0; // when time was counted on
  private clock = 0; // seconds of the recording since the frame that is shown

  constructor(private readonly file: FramesFile, private readonly stage: Stage) {
    this.slider.max = String(file.num - 1);
    const step = (by: number) => () => this.seek(this.at + by);
    this.element = make("div", { class: "card player", role: "group", "aria-label": "Playback" },
      make("div", { class: "row" }, make("span", {}, "Playing ", make("bdi", { class: "code" }, file.name)), button("Back to live", () => this.close())),
      make("div", { class: "controls" }, this.play, button("‹", step(-1), { "aria-label": "Previous frame" }), button("›", step(1), { "aria-label": "Next frame" }), this.slider, this.time, this.speed));
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== " " || event.target !== this.slider) return;
      event.preventDefault();
      this.toggle();
    });
    this.seek(0);
  }

  get isPlaying(): boolean {
    return this.frame !== 0;
  }

  pause(): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.play.textContent = "Play";
  }

  private close(): void {
    this.pause();
    this.stage.close();
  }

  private toggle(): void {
    if (this.isPlaying) {
      this.pause();
      return;
    }
    if (this.at >= this.file.num - 1) this.seek(0);
    this.play.textContent = "Pause";
    this.clock = 0;
    this.last = performance.now();
    this.frame = requestAnimationFrame((now) => this.turn(now));
  }

  private seek(index: number): void {
    this.at = Math.max(0, Math.min(this.file.num - 1, index));
    this.clock = 0;
    const { update, before } = this.file.seek(this.at);
    this.stage.jump(update, before);
    this.showTime();
  }

  private turn(now: number): void {
    this.clock += ((now - this.last) / 1000) * Number(this.speed.value);
    this.last = now;
    for (;;) {
      const gap = Math.min(MAX_GAP_S, this.file.timeOf(this.at + 1) - this.file.timeOf(this.at));
      if (this.at >= this.file.num - 1 || this.clock < gap) break;
      this.clock -= gap;
      this.at++;
      const update = this.file.next();
      if (update) this.stage.update(update);
    }
    this.showTime();
    if (this.at >= this.file.num - 1) this.pause();
    else this.frame = requestAnimationFrame((next) => this.turn(next));
  }

  private showTime(): void {
    this.slider.value = String(this.at);
    const text = `${this.file.timeOf(this.at).toFixed(2)} of ${this.file.timeOf(this.file.num - 1).toFixed(2)} s`;
    if (this.time.textContent === text) return;
    this.time.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }
}
