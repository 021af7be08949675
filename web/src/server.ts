// The server as the page sees it: its public endpoints, the key, and whether the engine is there.

const KEY = "quire.key";

export class ServerError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

export const key = {
  get: (): string => sessionStorage.getItem(KEY) ?? "",
  set: (value: string): void => sessionStorage.setItem(KEY, value),
};

/** Ask the server. Throws ServerError with what it says is wrong. */
export async function request(path: string, body?: unknown, signal?: AbortSignal, method = body === undefined ? "GET" : "POST"): Promise<Response> {
  const headers: Record<string, string> = {};
  if (key.get()) headers["Authorization"] = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    cache: "no-store",
    ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    ...(signal ? { signal } : {}),
  });
  if (answer.ok) return answer;
  throw new ServerError(answer.status, await reasonOf(answer));
}

async function reasonOf(answer: Response): Promise<string> {
  try {
    const errorBody = (await answer.json()) as { error?: { message?: string } };
    if (errorBody.error?.message) return errorBody.error.message;
  } catch {
    // a proxy's own page
  }
  return `the server returned ${answer.status} ${answer.statusText}`;
}

export async function requestJson<T>(path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  return (await (await request(path, body, signal)).json()) as T;
}

/** Yield the events of a stream of server-sent events. heard: called for whatever the server sends,
 * comments too. Throws ServerError for an event that is an error, and if the stream ends before it was
 * done. */
export async function* events<T>(path: string, body?: unknown, signal?: AbortSignal, onData?: () => void): AsyncGenerator<T> {
  const answer = await request(path, body, signal);
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError(0, "the connection was lost");
      onData?.();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        if (!part.startsWith("data:")) continue;
        const event = JSON.parse(data) as { error?: { message: string } };
        if (event.error) throw new ServerError(503, event.error.message);
        yield event as Awaited<T>;
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

export type Health = "ready" | "engine away" | "server away";

/** Ask whether the engine is there. */
export async function health(): Promise<Health> {
  try {
    const answer = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    return answer.ok ? "ready" : "engine away";
  } catch {
    return "server away";
  }
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

export function messageOf(error: unknown): string {
  if (error instanceof ServerError) return error.message;
  return error instanceof TypeError ? "the server cannot be reached" : String(error);
}
