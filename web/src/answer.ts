// One answer of a chat, as it is streamed: what comes goes into its message and to who shows it.

import type { Call, Message, TextFile } from "./conversations";
import { events, isAbort, messageOf } from "./server";

interface CallPiece {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

interface Chunk {
  id?: string;
  choices: {
    delta: { content?: string | null; reasoning_content?: string | null; reasoning?: string | null; tool_calls?: CallPiece[] };
    finish_reason: string | null;
  }[];
  usage?: Usage;
}

/** The view of a growing answer. */
export interface Shown {
  grow(content: string): void;
  think(reasoning: string): void;
  call(calls: Call[]): void;
}

const MIN_RATE_S = 0.05; // over which a rate says something
const ENDS = ["stop", "tool_calls"]; // that need no remark

/** Fill a message from the server's stream. shown: returns the current view, as it may be drawn again. Never throws: the message notes its end. */
export async function follow(message: Message, body: object, signal: AbortSignal, shown: () => Shown | undefined): Promise<void> {
  const since = performance.now();
  let first = 0;
  try {
    for await (const chunk of events<Chunk>("v1/chat/completions", body, signal)) {
      const choice = chunk.choices[0];
      if (chunk.id) message.request = chunk.id;
      const { content, tool_calls: pieces } = choice?.delta ?? {};
      const reasoning = choice?.delta.reasoning_content ?? choice?.delta.reasoning;
      if (!first && (reasoning || content || pieces)) first = performance.now();
      if (reasoning) {
        message.reasoning = (message.reasoning ?? "") + reasoning;
        shown()?.think(reasoning);
      }
      if (content) {
        message.content += content;
        shown()?.grow(content);
      }
      if (pieces) {
        message.calls = taken(message.calls ?? [], pieces);
        shown()?.call(message.calls);
      }
      if (choice?.finish_reason && !ENDS.includes(choice.finish_reason)) message.note = `ended: ${choice.finish_reason}`;
      if (chunk.usage) message.usage = inWords(chunk.usage, since, first);
    }
  } catch (error) {
    message.note = isAbort(error) || signal.aborted ? "stopped" : `interrupted: ${messageOf(error)}`;
  }
}

/** Put pieces of calls behind what is there. */
function taken(calls: Call[], pieces: CallPiece[]): Call[] {
  for (const { index, id, function: piece } of pieces) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += piece?.name ?? "";
    call.arguments += piece?.arguments ?? "";
  }
  return calls;
}

function inWords(usage: Usage, since: number, first: number): string {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const parts = [`${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`, `${usage.completion_tokens} output tokens`];
  if (first) parts.push(`first token after ${Math.round(first - since)} ms`);
  const seconds = (performance.now() - first) / 1000;
  if (first && seconds > MIN_RATE_S && usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tok/s`);
  return parts.join(" · ");
}

/** Return an attached file as a block of code with its name. */
function fenced({ name, text }: TextFile): string {
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${name}:\n${fence}\n${text}\n${fence}`;
}

/** Return a conversation's messages as the server takes them. */
export function asSent(path: Message[], system: string): object[] {
  const messages = path.map(({ role, content: typed, images, files, calls, call }) => {
    const content = [...(files ?? []).map(fenced), typed].filter(Boolean).join("\n\n");
    const kept = images?.filter(Boolean) ?? [];
    if (kept.length) {
      const parts: object[] = kept.map((url) => ({ type: "image_url", image_url: { url } }));
      return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
    }
    if (role === "tool") return { role, content, tool_call_id: call };
    if (!calls?.length) return { role, content };
    const tool_calls = calls.map((each) => ({ id: each.id, type: "function", function: { name: each.name, arguments: each.arguments } }));
    return { role, content: content || null, tool_calls };
  });
  return system.trim() ? [{ role: "system", content: system.trim() }, ...messages] : messages;
}
