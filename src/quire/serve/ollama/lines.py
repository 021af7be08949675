"""An answer in Ollama's format: lines of JSON, or all lines merged into one object.

The engine's clock measures the times: `prompt_eval_duration` ends with the first token, and
`eval_duration` with the last one. `load_duration` is the time until the engine gets the request.
"""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from quire.render.templates.conversation import arguments_object
from quire.serve.http.sse import encode
from quire.serve.pipeline.answer import Answer, UsageCounter

Json = dict[str, Any]

NDJSON = "application/x-ndjson"
NS_PER_S = 1_000_000_000
# Reason of a chat's end -> reason in Ollama's format; other reasons have the same name.
REASONS = {"tool_calls": "stop"}
TEXTS = ("content", "response", "thinking")


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass
class LineWriter:
    """Converter of an answer's chunks to lines.

    is_chat: lines have a message, not the field `response`. started_ns: time when the request
    arrived, by `perf_counter_ns`. The time until the writer is made counts as `load_duration`.
    """

    model: str
    usage: UsageCounter
    is_chat: bool
    started_ns: int
    _made_ns: int = field(default_factory=time.perf_counter_ns, init=False)
    _calls: dict[int, Json] = field(default_factory=dict, init=False)  # calls not sent yet

    def of_chunk(self, chunk: Json) -> list[Json]:
        """Return the lines of a chunk of a chat's or a completion's stream."""
        [choice] = chunk["choices"]
        delta = choice.get("delta", choice)
        content = delta.get("content") or delta.get("text") or ""
        parts: Json = {"thinking": thought} if (thought := delta.get("reasoning")) else {}
        if calls := self._take_calls(delta.get("tool_calls") or (), choice["finish_reason"]):
            parts["tool_calls"] = calls
        logprobs = (choice.get("logprobs") or {}).get("content")
        found = []
        if content or parts or logprobs:
            found.append(self._line(content, parts, logprobs))
        if choice["finish_reason"] is not None:
            found.append(self._end(choice["finish_reason"]))
        return found

    def _line(self, content: str, parts: Json, logprobs: object = None) -> Json:
        line: Json = {"model": self.model, "created_at": now()}
        if self.is_chat:
            line["message"] = {"role": "assistant", "content": content} | parts
        else:
            line |= {"response": content} | parts
        line["done"] = False
        return line | ({"logprobs": logprobs} if logprobs else {})

    def _take_calls(self, deltas: Iterable[Json], reason: str | None) -> list[Json]:
        """Collect the pieces of calls, and return the complete calls. The last call is complete at
        the end of the answer."""
        for delta in deltas:
            function = delta["function"]
            call = self._calls.setdefault(delta["index"], {"id": "", "name": "", "text": ""})
            call["id"] = delta.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["text"] += function.get("arguments") or ""
        last = max(self._calls, default=-1)
        complete = [index for index in sorted(self._calls) if index < last or reason is not None]
        return [_call_json(index, self._calls.pop(index)) for index in complete]

    def _end(self, reason: str) -> Json:
        usage, times = self.usage, self.usage.metrics
        prompt_ns = eval_ns = 0
        if times is not None and times.first_token_s is not None:
            prompt_ns = round((times.first_token_s - times.arrival_s) * NS_PER_S)
            last_s = times.last_token_s or times.first_token_s
            eval_ns = round((last_s - times.first_token_s) * NS_PER_S)
        return self._line("", {}) | {
            "done": True,
            "done_reason": REASONS.get(reason, reason),
            "total_duration": time.perf_counter_ns() - self.started_ns,
            "load_duration": self._made_ns - self.started_ns,
            "prompt_eval_count": usage.num_prompt,
            "prompt_eval_duration": max(1, prompt_ns),  # clients divide by these
            "eval_count": usage.num_completion,
            "eval_duration": max(1, eval_ns),
        }


def _call_json(index: int, call: Json) -> Json:
    arguments = arguments_object(call["text"])
    function = {"index": index, "name": call["name"], "arguments": arguments}
    return {"id": call["id"], "function": function}


def merged(lines: Iterable[Json]) -> Json:
    """Return one object with the texts, calls and log-probabilities of all lines."""
    texts: dict[str, list[str]] = {}
    calls: list[Json] = []
    logprobs: list[Json] = []
    whole: Json = {}
    for line in lines:
        whole = line
        holder = line.get("message", line)
        for name in TEXTS:
            if holder.get(name):
                texts.setdefault(name, []).append(holder[name])
        calls += holder.get("tool_calls", ())
        logprobs += line.get("logprobs", ())
    holder = whole.get("message", whole)
    holder |= {name: "".join(pieces) for name, pieces in texts.items()}
    if calls:
        holder["tool_calls"] = calls
    return whole | ({"logprobs": logprobs} if logprobs else {})


def loaded(model: str, is_chat: bool) -> Json:
    """Return the answer to a request without a prompt, by which clients load a model."""
    text: Json = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now()} | text | {"done": True, "done_reason": "load"}


def line_bytes(line: Json) -> bytes:
    return encode(line) + b"\n"


async def whole(answer: Answer, writer: LineWriter) -> Json:
    """Return the whole answer."""
    found: list[Json] = []
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            for chunk in chunks:
                found += writer.of_chunk(chunk)
    return merged(found)


async def stream(answer: Answer, writer: LineWriter) -> AsyncGenerator[bytes, None]:
    """Yield the lines of each output that has any, as bytes."""
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            found = [line for chunk in chunks for line in writer.of_chunk(chunk)]
            if found:
                yield b"".join(map(line_bytes, found))
