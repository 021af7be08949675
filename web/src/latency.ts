// Mean times to a first token and between tokens, from the sums and counts of /metrics.

import { request } from "./server";

type Times = Record<"first" | "next", { sum: number; count: number }>;

/** Reads /metrics repeatedly; means cover the time between two reads. */
export class Latency {
  private times: Times | null = null;

  forget(): void {
    this.times = null;
  }

  /** Return mean times in milliseconds since the last look: to the first token, and between tokens; NaN: there were none. Throws if the server does not answer. */
  async read(): Promise<[first: number, next: number]> {
    const before = this.times;
    this.times = null; // until there is an answer
    const now = (this.times = timesIn(await (await request("metrics")).text()));
    const mean = (kind: "first" | "next"): number => {
      const [old, young] = [before?.[kind], now[kind]];
      return old && young.count > old.count ? (1000 * (young.sum - old.sum)) / (young.count - old.count) : NaN;
    };
    return [mean("first"), mean("next")];
  }
}

/** Find sums and counts of two histograms in Prometheus' text, over all cores. */
function timesIn(text: string): Times {
  const times: Times = { first: { sum: 0, count: 0 }, next: { sum: 0, count: 0 } };
  for (const [, name, field, value] of text.matchAll(/^\w+:(time_to_first_token|inter_token_latency)_seconds_(sum|count)(?:\{.*\})? (\S+)$/gm)) {
    times[name === "time_to_first_token" ? "first" : "next"][field as "sum" | "count"] += Number(value);
  }
  return times;
}
