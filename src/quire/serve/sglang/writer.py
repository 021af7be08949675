"""Continuations in the format of SGLang's /generate.

An object has the whole text so far, its token ids and `meta_info`. In a stream, each event repeats
the text from its beginning. Only the first and the last event have the log-probabilities of the
prompt, which can be long.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.serve.http.sse import DONE, event
from quire.serve.pipeline.answer import Answer, UsageCounter

Json = dict[str, Any]
Entry = tuple[float | None, int, str | None]  # log-probability, token id, text

LENGTH, STOP = "length", "stop"
WEIGHT_VERSION = "default"


@dataclass
class Options:
    """Options of a response. num_top: alternatives for each token, None without log-probabilities.
    prompt_start: first token of the prompt with log-probabilities; -1 for none."""

    num_top: int | None = None
    prompt_start: int = -1
    with_texts: bool = False


@dataclass
class Continuation:
    """One continuation, which grows. request_id: of its prompt's request."""

    request_id: str
    usage: UsageCounter
    options: Options
    is_alone: bool  # the only continuation of its prompt
    _text: str = field(default="", init=False)
    _token_ids: list[int] = field(default_factory=list, init=False)
    _entries: list[Json] = field(default_factory=list, init=False)
    _prompt: list[Json] = field(default_factory=list, init=False)
    _ended: Json | None = field(default=None, init=False)
    _is_begun: bool = field(default=False, init=False)  # a stream has sent an event

    def take(self, choice: Json) -> None:
        """Add a chunk of this continuation's stream, or all of it."""
        self._text += choice["text"]
        self._token_ids += choice.get("token_ids") or ()
        self._entries += (choice.get("logprobs") or {}).get("content") or ()
        self._prompt = choice.get("prompt_logprobs") or self._prompt
        if choice["finish_reason"] is not None:
            self._ended = self._reason(choice)

    def json(self, started_s: float) -> Json:
        """Return the continuation so far. started_s: when its request arrived."""
        usage = self.usage
        meta: Json = {
            "id": self.request_id,
            "finish_reason": self._ended,
            "prompt_tokens": usage.num_prompt,
            "completion_tokens": self._num_tokens,
            "cached_tokens": usage.num_cached,
            "weight_version": WEIGHT_VERSION,
        }
        if self._ended is not None:
            meta["e2e_latency"] = time.monotonic() - started_s
        if self.options.num_top is not None:
            meta |= self._logprobs("output", self._entries)
            start, is_within = self.options.prompt_start, self._is_begun and self._ended is None
            meta |= self._logprobs("input", [] if start < 0 or is_within else self._prompt[start:])
        self._is_begun = True
        return {"text": self._text, "output_ids": list(self._token_ids), "meta_info": meta}

    @property
    def _num_tokens(self) -> int:
        """Number of generated tokens. A hook may have removed the ids."""
        return self.usage.num_completion if self.is_alone else len(self._token_ids)

    def _reason(self, choice: Json) -> Json:
        reason, matched = choice["finish_reason"], choice.get("stop_reason")
        if reason == LENGTH:
            return {"type": LENGTH, "length": self._num_tokens}
        if reason != STOP:
            return {"type": "abort", "message": reason}
        if matched is None and self._token_ids:
            matched = self._token_ids[-1]  # the end token
        return {"type": STOP, "matched": matched}

    def _logprobs(self, kind: str, entries: Sequence[Json]) -> Json:
        found: Json = {f"{kind}_token_logprobs": [self._entry(each) for each in entries]}
        if self.options.num_top:
            tops = [each["top_logprobs"] for each in entries]
            found[f"{kind}_top_logprobs"] = [
                None if top is None else [self._entry(each) for each in top] for top in tops
            ]
        return found

    def _entry(self, entry: Json) -> Entry:
        text = entry["token"] if self.options.with_texts else None
        return entry["logprob"], entry["id"], text


@dataclass
class Writer:
    """Converter of the chunks of all continuations, by index. is_list: the response is a list, for
    several prompts or continuations. started_s: when the request arrived."""

    continuations: list[Continuation]
    is_list: bool
    started_s: float

    async def whole(self, answer: Answer) -> Json | list[Json]:
        """Return the whole response."""
        async with aclosing(answer.chunks()) as pieces:
            async for chunks in pieces:
                self._take(chunks)
        found = [each.json(self.started_s) for each in self.continuations]
        return found if self.is_list else found[0]

    async def stream(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yield an event for each continuation that has grown, as bytes."""
        async with aclosing(answer.chunks()) as pieces:
            async for chunks in pieces:
                yield b"".join(event(self._event(index)) for index in self._take(chunks))
        yield DONE

    def _take(self, chunks: list[Json]) -> list[int]:
        """Take chunks, and return the continuations that they belong to."""
        changed: dict[int, None] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                self.continuations[choice["index"]].take(choice)
                changed[choice["index"]] = None
        return list(changed)

    def _event(self, index: int) -> Json:
        found = self.continuations[index].json(self.started_s)
        return found | ({"index": index} if self.is_list else {})
