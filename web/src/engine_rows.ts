// Rows of the Engine view's tables: who runs, who waits and why, what is pinned.

import { colourOf } from "./block_map";
import { button, make } from "./dom";
import type { Row } from "./keyed_rows";
import type { Held, Pinned, Running, Snapshot, Waiting } from "./live";

/** The actions of a request's links. */
export interface Links {
  showStory(id: string): void;
  /** Let the blocks of a request stand out; -1 none. */
  choose(number: number): void;
}

export function runningRow(row: Running, links: Links): Row {
  const computed = Math.min(row.num_computed_tokens, row.num_prompt_tokens);
  const written = Math.max(0, row.num_known_tokens - row.num_prompt_tokens);
  const isPrompt = computed < row.num_prompt_tokens;
  const share = isPrompt ? computed / row.num_prompt_tokens : written / Math.max(1, row.limit - row.num_prompt_tokens);
  const prompt = isPrompt ? `${computed} / ${row.num_prompt_tokens}` : String(row.num_prompt_tokens);
  const cells = [Math.min(1, share), prompt, String(written), String(row.num_cached_tokens), String(row.num_blocks)];
  return { key: `${row.id} ${row.number} ${row.index}`, first: () => link(row, links), cells, isPrompt };
}

export function waitingRow(row: Waiting, state: Snapshot, links: Links): Row {
  const reason = state.reasons[row.reason] ?? row.reason;
  const since = Math.max(0, state.at_s - row.arrival_s);
  const cells = [String(row.num_known_tokens), `${since.toFixed(1)} s`, row.is_swapped ? `in host memory; ${reason}` : reason, String(row.num_preemptions)];
  return { key: `${row.id} ${row.number} ${row.index}`, first: () => link(row, links), cells };
}

export function pinnedRow(row: Pinned): Row {
  const cells = [String(row.num_tokens), String(row.num_blocks), String(row.num_hits)];
  return { key: row.id, first: () => make("bdi", { class: "code", title: row.id }, row.id), cells };
}

export function heldRow(row: Held, now: number, links: Links): Row {
  const left = Math.max(0, row.ends_s - now);
  const name = `${row.id.slice(0, 14)}…${row.index ? `.${row.index}` : ""}`;
  const first = (): HTMLElement => button(name, () => links.showStory(row.id), { class: "link code", title: row.id });
  return { key: `${row.id} ${row.index}`, first, cells: [String(row.num_tokens), row.num_blocks ? String(row.num_blocks) : "given up", `${left.toFixed(0)} s`] };
}

function link(row: Running | Waiting, links: Links): HTMLElement {
  const mark = make("i", { class: "mark" });
  mark.style.background = colourOf(row.number);
  const name = `#${row.number}${row.index ? `.${row.index}` : ""}`;
  const made = button(name, () => links.showStory(row.id), { class: "link", title: row.id });
  made.prepend(mark);
  for (const [event, number] of [["pointerenter", row.number], ["pointerleave", -1], ["focus", row.number], ["blur", -1]] as const) made.addEventListener(event, () => links.choose(number));
  return made;
}
