// One run of tokens that a model writes: requested, forked from another run, and kept.
//
// A run is kept by the server for a while (keep_s), so that a fork of it shares its blocks. Where
// nothing is kept any more, or the server cannot, a fork is a new request over the same token ids.

import { ServerError, request, events, isAbort } from "./server";

const KEEP_S = 600;
const NUM_ALTERNATIVES = 8;
const NOT_KEPT = [400, 404, 405]; // what a server answers that keeps nothing, or not this
const TOO_MUCH_KEPT = 503;

export interface Alternative {
  text: string;
  id: number | undefined;
  logprob: number;
}

export interface Token {
  text: string;
  id: number | undefined;
  logprob: number | null;
  others: Alternative[];
}

interface Logprobs {
  tokens: string[];
  token_logprobs: (number | null)[];
  top_logprobs: (Record<string, number> | null)[] | null;
  top_token_ids?: (Record<string, number> | null)[];
}

interface Chunk {
  id: string;
  choices: { text: string; finish_reason: string | null; logprobs: Logprobs | null; token_ids?: number[] | null; prompt_token_ids?: number[] | null }[];
  forked_from?: { id: string; at_token: number };
}

export interface RunSettings {
  model: string | undefined;
  values: Record<string, number>; // sampling parameters
}

export class TokenRun {
  readonly tokens: Token[] = [];
  promptIds: number[] | null = null;
  end = ""; // how it ended
  isShared = false; // forked from what the server kept: blocks are shared
  private id = "";
  private readonly control = new AbortController();

  /** given: tokens shared with the source run. `told`: called whenever tokens arrive. */
  constructor(readonly prompt: string, private readonly runSettings: RunSettings, readonly given: Token[], readonly from: TokenRun | null, private readonly onTokens: (tokens: Token[]) => void) {}

  get isOver(): boolean {
    return this.end !== "";
  }

  stop(): void {
    this.control.abort();
  }

  /** Stop it, and let the server keep it no longer. */
  release(): void {
    this.stop();
    if (this.id) void request(`v1/requests/${encodeURIComponent(this.id)}`, undefined, undefined, "DELETE").catch(() => undefined); // it is kept no more, or never was
  }

  /** Let it be written. Throws what the server says is wrong. */
  async write(): Promise<void> {
    this.take(this.given);
    try {
      if (this.from) await this.fork(this.from);
      else await this.follow("v1/completions", { prompt: this.prompt });
      this.end ||= "interrupted";
    } catch (error) {
      this.end = "interrupted";
      if (!isAbort(error) && !this.control.signal.aborted) throw error;
      this.end = "stopped";
    }
  }

  private async fork(from: TokenRun): Promise<void> {
    const chosen = this.given.at(-1);
    const numPrompt = from.promptIds?.length ?? 0;
    if (from.id && chosen?.id !== undefined && numPrompt) {
      try {
        const path = `v1/requests/${encodeURIComponent(from.id)}/fork`;
        await this.follow(path, { at_token: numPrompt + this.given.length - 1, token_ids: [chosen.id] });
        return;
      } catch (error) {
        if (!(error instanceof ServerError && NOT_KEPT.includes(error.status))) throw error;
      }
    }
    const ids = this.given.map((token) => token.id);
    const isKnown = numPrompt > 0 && ids.every((id) => id !== undefined);
    const prompt = isKnown ? [...(from.promptIds ?? []), ...ids] : this.prompt + this.given.map((token) => token.text).join("");
    await this.follow("v1/completions", { prompt });
  }

  private async follow(path: string, body: object): Promise<void> {
    const { model, values } = this.runSettings;
    const whole = { model, ...body, stream: true, logprobs: NUM_ALTERNATIVES, return_token_ids: true, keep_s: KEEP_S, ...values };
    try {
      await this.listen(path, whole);
    } catch (error) {
      if (!(error instanceof ServerError && error.status === TOO_MUCH_KEPT && this.tokens.length === this.given.length)) throw error;
      await this.listen(path, { ...whole, keep_s: undefined }); // too much is kept already
    }
  }

  private async listen(path: string, body: object): Promise<void> {
    for await (const chunk of events<Chunk>(path, body, this.control.signal)) {
      const choice = chunk.choices[0];
      this.id = chunk.id;
      this.isShared ||= chunk.forked_from !== undefined;
      if (choice?.prompt_token_ids && !this.promptIds) this.promptIds = this.from?.promptIds ?? choice.prompt_token_ids;
      if (choice?.logprobs) this.take(tokensOf(choice.logprobs, choice.token_ids ?? []));
      if (choice?.finish_reason) this.end = choice.finish_reason;
    }
  }

  private take(tokens: Token[]): void {
    this.tokens.push(...tokens);
    if (tokens.length) this.onTokens(tokens);
  }
}

function tokensOf(found: Logprobs, ids: number[]): Token[] {
  return found.tokens.map((text, i) => {
    const known = found.top_token_ids?.[i] ?? {};
    const others = Object.entries(found.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, id: known[other], logprob }));
    return { text, id: ids[i], logprob: found.token_logprobs[i] ?? null, others: others.sort((a, b) => b.logprob - a.logprob) };
  });
}
