// The engine's state, updated from `v1/engine/live` while it is visible.

import { ServerError, events, isAbort, messageOf } from "./server";

export interface Running {
  id: string;
  number: number;
  index: number;
  num_prompt_tokens: number;
  num_computed_tokens: number;
  num_known_tokens: number;
  limit: number;
  num_cached_tokens: number;
  num_preemptions: number;
  num_blocks: number;
}

export interface Waiting {
  id: string;
  number: number;
  index: number;
  num_known_tokens: number;
  num_preemptions: number;
  is_swapped: boolean;
  arrival_s: number;
  reason: string;
}

/** A prefix that is pinned. */
export interface Pinned {
  id: string;
  num_tokens: number;
  num_blocks: number;
  num_hits: number;
}

/** A sequence of a request that has ended and is held. */
export interface Held {
  id: string;
  index: number;
  num_tokens: number;
  num_blocks: number;
  ends_s: number;
}

/** Blocks of host memory. */
export interface Host {
  num_blocks: number;
  num_swapped: number;
  num_cached: number;
}

export interface Step {
  step: number;
  at_s: number;
  prefill_tokens: number;
  decode_tokens: number;
  sampled_tokens: number;
  duration_ms: number;
}

export interface Group {
  kind: string;
  owners: number[];
  sharers: number[];
  states: number[];
}

type Change = Group & { group: number; blocks: number[] };
export type BlockEvent = [kind: string, group: number, block: number];

export interface Snapshot {
  type: "snapshot";
  at_s: number;
  core: number;
  num_cores: number;
  states: string[];
  reasons: Record<string, string>;
  block_size: number;
  num_rows: number;
  groups: Group[];
  running: Running[];
  num_running: number;
  waiting: Waiting[];
  num_waiting: number;
  pinned: Pinned[];
  held: Held[];
  num_held: number;
  host: Host;
  steps: Step[];
  events?: BlockEvent[];
  counts?: Record<string, number>;
  first_ms?: number; // mean times, of recordings alone
  next_ms?: number;
}

export interface Difference {
  type: "difference";
  at_s: number;
  groups?: Change[];
  running?: Running[];
  num_running?: number;
  waiting?: Waiting[];
  num_waiting?: number;
  pinned?: Pinned[];
  held?: Held[];
  num_held?: number;
  host?: Host;
  steps?: Step[];
  events?: BlockEvent[];
  counts?: Record<string, number>;
  first_ms?: number;
  next_ms?: number;
}

/** The changes of an event. blocks: by cache group; null: all. */
export interface Update {
  state: Snapshot;
  blocks: (number[] | null)[];
  events: BlockEvent[];
  counts: Record<string, number>;
  steps: Step[];
  times?: [first: number, next: number]; // mean milliseconds, of recordings alone; NaN: none came
}

export interface Watcher {
  update(update: Update): void;
  /** The engine is away, and asked again; refused: this key may not watch it. */
  away(why: string): void;
  refused(why: string): void;
}

const AGAIN_MS = 1000;
const QUIET_MS = 5000;

/** Follows one core until it is stopped; when the engine goes it says so, and comes back. */
export class Live {
  private control: AbortController | null = null;
  private quiet = 0;

  /** model: of which the engine is watched; none is the server's first. */
  constructor(private readonly watcher: Watcher, private readonly model: () => string | undefined, private core = 0) {}

  get isOn(): boolean {
    return this.control !== null;
  }

  start(): void {
    if (this.control) return;
    this.control = new AbortController();
    void this.run(this.control);
  }

  stop(): void {
    this.control?.abort();
    this.control = null;
    clearTimeout(this.quiet);
  }

  choose(core: number): void {
    this.core = core;
    this.again();
  }

  /** Restart, if it is on. */
  again(): void {
    if (!this.isOn) return;
    this.stop();
    this.start();
  }

  private async run(control: AbortController): Promise<void> {
    while (!control.signal.aborted) {
      try {
        await this.follow(control.signal);
        this.watcher.away("the server is shutting down");
      } catch (error) {
        if (control.signal.aborted || isAbort(error)) return;
        if (error instanceof ServerError && [401, 403, 404].includes(error.status)) {
          this.stop();
          this.watcher.refused(messageOf(error));
          return;
        }
        this.watcher.away(messageOf(error));
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  private async follow(signal: AbortSignal): Promise<void> {
    let state: Snapshot | null = null;
    this.listen();
    const model = this.model();
    const path = `v1/engine/live?core=${this.core}${model ? `&model=${encodeURIComponent(model)}` : ""}`;
    for await (const event of events<Snapshot | Difference>(path, undefined, signal, () => this.listen())) {
      if (event.type === "snapshot") {
        state = event;
        const blocks = state.groups.map(() => null);
        this.watcher.update({ state, blocks, events: [], counts: {}, steps: state.steps });
      } else if (state) {
        this.watcher.update(apply(state, event));
      }
    }
  }

  /** Wait for the server's next message; it sends a comment if no frame was made for a second. */
  private listen(): void {
    clearTimeout(this.quiet);
    this.quiet = window.setTimeout(() => this.watcher.away(`no update from the engine for ${QUIET_MS / 1000} s`), QUIET_MS);
  }
}

/** Bring a snapshot up to date. */
export function apply(state: Snapshot, event: Difference): Update {
  const blocks: number[][] = state.groups.map(() => []);
  for (const change of event.groups ?? []) {
    const mine = state.groups[change.group];
    if (!mine) continue;
    change.blocks.forEach((block, i) => {
      mine.owners[block] = change.owners[i] ?? -1;
      mine.sharers[block] = change.sharers[i] ?? 0;
      mine.states[block] = change.states[i] ?? 0;
    });
    blocks[change.group] = change.blocks;
  }
  state.at_s = event.at_s;
  const { running, num_running, waiting, num_waiting, pinned, held, num_held, host } = event;
  const changed = Object.entries({ running, num_running, waiting, num_waiting, pinned, held, num_held, host });
  Object.assign(state, Object.fromEntries(changed.filter(([, value]) => value !== undefined)));
  return { state, blocks, events: event.events ?? [], counts: event.counts ?? {}, steps: event.steps ?? [] };
}
