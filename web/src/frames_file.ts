// A recording as frames, read from a file of the visitor's own: `quire playback` writes one, and so
// does who keeps what v1/engine/live sends. Nothing is uploaded.

import { apply, type Difference, type Snapshot, type Step, type Update } from "./live";

export interface Frame {
  at_s: number;
  event: Snapshot | Difference;
}

const HISTORY_S = 60; // that charts show
/** Of a whole frame that another version of quire has written. */
const ABSENT = { running: [], num_running: 0, waiting: [], num_waiting: 0, pinned: [], held: [], num_held: 0, host: { num_blocks: 0, num_swapped: 0, num_cached: 0 }, steps: [], reasons: {} };

/** The part of a frame, and of the frames before it, that charts show. */
export type Before = { at_s: number; steps: Step[]; times: [first: number, next: number] }[];

/** Read a file of JSON lines, packed with gzip or not. Throws Error if it is not one of ours. */
export async function readFrames(file: File): Promise<FramesFile> {
  const isPacked = file.name.endsWith(".gz");
  const stream = isPacked ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
  const text = await new Response(stream).text();
  const frames: Frame[] = [];
  let stories: Record<string, string[]> = {};
  for (const line of text.split("\n")) {
    const json = line.replace(/^data: ?/, "").trim();
    if (!json.startsWith("{")) continue;
    const event = parsed(json);
    if (event?.type === "stories") stories = event.requests;
    else if (event?.type === "snapshot") frames.push({ at_s: event.at_s, event: { ...ABSENT, ...event } });
    else if (event?.type === "difference" && frames.length) frames.push({ at_s: event.at_s, event });
  }
  if (!frames.length) throw new Error(`${file.name} has no frames. Make a file from a recording with \`quire playback RECORDING --output FILE\`.`);
  return new FramesFile(file.name, frames, stories);
}

type Line = Snapshot | Difference | { type: "stories"; requests: Record<string, string[]> };

/** Return the event of a line; null for one that was cut off. */
function parsed(json: string): Line | null {
  try {
    return JSON.parse(json) as Line;
  } catch {
    return null;
  }
}

/** All frames of a recording, and the state at each. */
export class FramesFile {
  private state: Snapshot | null = null;
  private at = -1;

  constructor(readonly name: string, private readonly frames: Frame[], readonly stories: Record<string, string[]>) {}

  get num(): number {
    return this.frames.length;
  }

  /** Return when a frame was, in seconds since the first one. */
  timeOf(index: number): number {
    return (this.frames[index]?.at_s ?? 0) - (this.frames[0]?.at_s ?? 0);
  }

  /** Return the next frame as what has changed since the one before it; null after the last one. */
  next(): Update | null {
    const frame = this.frames[this.at + 1];
    return frame ? this.take(this.at + 1, frame) : null;
  }

  /** Go to a frame: all that there is then, and what the charts show of the time before. */
  seek(index: number): { update: Update; before: Before } {
    let first = index;
    while (first > 0 && this.frames[first]?.event.type !== "snapshot") first--;
    this.state = null;
    for (let at = first; at <= index; at++) {
      const frame = this.frames[at];
      if (frame) this.take(at, frame);
    }
    const state = this.state ?? (this.frames[0]?.event as Snapshot);
    const since = state.at_s - HISTORY_S;
    let earliest = index;
    while (earliest > 0 && (this.frames[earliest - 1]?.at_s ?? 0) >= since) earliest--;
    const before = this.frames.slice(earliest, index + 1).map(({ at_s, event }) => ({ at_s, steps: event.steps ?? [], times: timesOf(event) }));
    return { update: { state, blocks: state.groups.map(() => null), events: [], counts: this.countsUpTo(index), steps: [] }, before };
  }

  private countsUpTo(index: number): Record<string, number> {
    const sums: Record<string, number> = {};
    for (const { event } of this.frames.slice(0, index + 1)) {
      for (const [kind, num] of Object.entries(event.counts ?? {})) sums[kind] = (sums[kind] ?? 0) + num;
    }
    return sums;
  }

  private take(at: number, { event }: Frame): Update {
    this.at = at;
    if (event.type === "difference" && this.state) return { ...apply(this.state, event), times: timesOf(event) };
    const before = this.state;
    const state = structuredClone(event as Snapshot);
    const isSame = before?.groups.length === state.groups.length && before.groups.every((group, g) => group.states.length === state.groups[g]?.states.length);
    if (before && isSame) Object.assign(before, state);
    else this.state = state;
    const now = this.state ?? state;
    return { state: now, blocks: now.groups.map(() => null), events: state.events ?? [], counts: state.counts ?? {}, steps: state.steps, times: timesOf(state) };
  }
}

function timesOf({ first_ms = NaN, next_ms = NaN }: Snapshot | Difference): [first: number, next: number] {
  return [first_ms, next_ms];
}
