"""A chat's answer as a message made of blocks: as events of a stream, or as one whole message.

A block ends where the next one begins, so the blocks are in the order in which the model wrote
them. A whole message is assembled from the same events.
"""

import hashlib
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.base.requests.hooks import CONTENT_FILTER
from quire.render.templates.conversation import arguments_object
from quire.serve.anthropic.protocol import TTLS
from quire.serve.http.sse import encode
from quire.serve.pipeline.answer import Answer, UsageCounter
from quire.serve.pipeline.retention import Retention

Json = dict[str, Any]

TOOL_USE = "tool_use"
# Reason of a chat's end -> reason of a message's end.
REASONS = {"tool_calls": TOOL_USE, "length": "max_tokens", CONTENT_FILTER: "refusal"}
END = "end_turn"
NO_ROOM = "model_context_window_exceeded"
# Parts of usage without a meaning here, and those without a value for most messages.
NO_USAGE: Json = {
    "cache_creation": None,
    "output_tokens_details": None,
    "server_tool_use": None,
    "inference_geo": None,
    "service_tier": "standard",
}


@dataclass
class MessageEvents:
    """Converter of a chat's chunks to a message's events.

    head: id and model. usage: counter of the answer's choice. stops: the request's stop_sequences.
    shows_thinking: send the text of reasoning, not only an empty block. is_cut: the answer got less
    room than max_tokens. is_dropped: the answer is computed but not sent (max_tokens is 0).
    retention: requested by marks of the cache.
    """

    head: Json
    usage: UsageCounter
    stops: Collection[str] = ()
    shows_thinking: bool = True
    is_cut: bool = False
    is_dropped: bool = False
    retention: Retention | None = None
    _begun: bool = field(default=False, init=False)
    _num_blocks: int = field(default=0, init=False)  # number of ended blocks
    _open: str = field(default="", init=False)  # type of the open block, empty if none is open
    _thought: "hashlib._Hash" = field(default_factory=hashlib.sha256, init=False)

    def of_chunk(self, chunk: Json) -> list[Json]:
        """Return the events of a chunk of a chat's stream."""
        [choice] = chunk["choices"]
        found: list[Json] = []
        if not self._begun:
            self._begun = True
            found += [{"type": "message_start", "message": self._message()}, {"type": "ping"}]
        if not self.is_dropped:
            found += self._of_delta(choice["delta"])
        if choice["finish_reason"] is not None:
            found += [*self._end_block(), self._end(choice), {"type": "message_stop"}]
        return found

    def _message(self) -> Json:
        kind: Json = {"type": "message", "role": "assistant", "content": [], "container": None}
        ends = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        return self.head | kind | ends | {"usage": self._usage_json()}

    def _of_delta(self, delta: Json) -> list[Json]:
        found: list[Json] = []
        if thought := delta.get("reasoning"):
            if self._open != "thinking":
                found += self._begin("thinking", thinking="", signature="")
            self._thought.update(thought.encode("utf-8", "surrogatepass"))
            if self.shows_thinking:
                found.append(self._delta(type="thinking_delta", thinking=thought))
        if text := delta.get("content"):
            if self._open != "text":
                found += self._begin("text", text="", citations=None)
            found.append(self._delta(type="text_delta", text=text))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                named = {"id": call["id"], "name": function["name"]}
                found += self._begin(TOOL_USE, **named, input={}, caller={"type": "direct"})
            if function["arguments"]:
                text = function["arguments"]
                found.append(self._delta(type="input_json_delta", partial_json=text))
        return found

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        found = self._end_block()
        self._open = kind
        block = {"type": kind, **fields}
        return [
            *found,
            {"type": "content_block_start", "index": self._num_blocks, "content_block": block},
        ]

    def _delta(self, **fields: Any) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": fields}

    def _end_block(self) -> list[Json]:
        """End the open block, if there is one. A thinking block gets a signature, because clients
        expect one; it proves nothing."""
        if not self._open:
            return []
        found: list[Json] = []
        if self._open == "thinking":
            signature = self._thought.hexdigest()
            found.append(self._delta(type="signature_delta", signature=signature))
            self._thought = hashlib.sha256()
        found.append({"type": "content_block_stop", "index": self._num_blocks})
        self._open = ""
        self._num_blocks += 1
        return found

    def _end(self, choice: Json) -> Json:
        why, stop = choice["finish_reason"], choice.get("stop_reason")
        reason = REASONS.get(why, END)
        if self.is_dropped:
            reason = REASONS["length"]
        elif why == "length" and self.is_cut:
            reason = NO_ROOM
        sequence = stop if reason == END and stop in self.stops else None
        details = None
        if why == CONTENT_FILTER:
            details = {"type": "refusal", "category": None, "explanation": stop}
        delta = {
            "stop_reason": "stop_sequence" if sequence is not None else reason,
            "stop_sequence": sequence,
            "stop_details": details,
        }
        return {"type": "message_delta", "delta": delta, "usage": self._usage_json()}

    def _usage_json(self) -> Json:
        """Return the tokens so far. Cached prompt tokens are counted separately."""
        usage, is_shown = self.usage, not self.is_dropped
        computed, retained = usage.num_prompt - usage.num_cached, self.retention
        written = computed if retained is not None and retained.is_retained else 0
        found: Json = {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.num_cached,
            "output_tokens": usage.num_completion if is_shown else 0,
        } | NO_USAGE
        if retained is not None:
            of_ttl = {f"ephemeral_{ttl}_input_tokens": 0 for ttl in TTLS}
            of_ttl[f"ephemeral_{retained.retention}_input_tokens"] = written
            found["cache_creation"] = of_ttl
        if usage.num_reasoning is not None:
            found["output_tokens_details"] = {
                "thinking_tokens": usage.num_reasoning if is_shown else 0
            }
        return found


def message_of(events: Iterable[Json]) -> Json:
    """Assemble a message from all its events."""
    message: Json = {}
    pieces: list[str] = []  # deltas of the open block
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
                pieces = []
            case "content_block_delta":
                _take(message["content"][-1], event["delta"], pieces)
            case "content_block_stop":
                _close(message["content"][-1], "".join(pieces))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def _take(block: Json, delta: Json, pieces: list[str]) -> None:
    match delta["type"]:
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            pieces.append(delta["partial_json"])
        case _:
            pieces.append(delta[block["type"]])


def _close(block: Json, text: str) -> None:
    if block["type"] == TOOL_USE:
        block["input"] = arguments_object(text)
    else:
        block[block["type"]] = text


async def whole(answer: Answer, events: MessageEvents) -> Json:
    """Return the whole message of an answer."""
    found: list[Json] = []
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            for chunk in chunks:
                found += events.of_chunk(chunk)
    return message_of(found)


async def stream(answer: Answer, events: MessageEvents) -> AsyncGenerator[bytes, None]:
    """Yield the events of each output that has any, as bytes."""
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            found = [event for chunk in chunks for event in events.of_chunk(chunk)]
            if found:
                yield b"".join(map(_event, found))


def _event(event: Json) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"
