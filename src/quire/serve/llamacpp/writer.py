"""A continuation in the format of llama.cpp's server: server-sent events, or one object.

The engine's clock measures the times: the prompt's part ends with the first token.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quire.serve.http.sse import event
from quire.serve.pipeline.answer import Answer, UsageCounter
from quire.serve.pipeline.requests import PromptJob

Json = dict[str, Any]

LIMIT, WORD, EOS, NONE = "limit", "word", "eos", "none"
# Parameters in generation_settings: names here, and in SamplingParams.
SETTINGS = {
    "seed": "seed", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "repeat_penalty": "repetition_penalty", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "n_predict": "max_tokens", "max_tokens": "max_tokens",
}  # fmt: skip


@dataclass
class CompletionWriter:
    """Converter of a text's chunks.

    returns_tokens: whole answers have token ids. shown: names of the fields to return, as
    `a/b` for a field of an object; empty for all. min_indent: cut the text before a line with fewer
    blanks. max_predict_ms: time from the first token until a text with a line break ends; 0: none.
    """

    model: str
    usage: UsageCounter
    job: PromptJob
    returns_tokens: bool = False
    shown: Sequence[str] = ()
    min_indent: int = 0
    max_predict_ms: int = 0
    _first_s: float | None = field(default=None, init=False)  # time of the first text
    _has_line: bool = field(default=False, init=False)  # the text has a line break
    _texts: list[str] = field(default_factory=list, init=False)
    _token_ids: list[int] = field(default_factory=list, init=False)
    _logprobs: list[Json] = field(default_factory=list, init=False)

    def of_chunk(self, chunk: Json) -> list[Json]:
        """Return the events of a chunk of a text's stream."""
        [choice] = chunk["choices"]
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        self._texts.append(choice["text"])
        self._has_line = self._has_line or "\n" in choice["text"]
        self._token_ids += choice.get("token_ids", ())
        self._logprobs += logprobs
        found = []
        if choice["text"] or choice.get("token_ids"):
            piece = self._piece(choice["text"], choice.get("token_ids", ()))
            found.append(piece | ({"completion_probabilities": logprobs} if logprobs else {}))
        if choice["finish_reason"] is None and self._is_late():
            choice = choice | {"finish_reason": "length"}
        if choice["finish_reason"] is not None:
            found.append(self._end(choice))
        return found

    def _is_late(self) -> bool:
        """Return whether the text's time is over, and a line of it is complete."""
        now = time.monotonic()
        self._first_s = now if self._first_s is None else self._first_s
        is_over = 0 < self.max_predict_ms <= (now - self._first_s) * 1000
        return is_over and self._has_line

    def whole(self, last: Json) -> Json:
        """Return the whole answer, given the last event."""
        text = cut_at_indent("".join(self._texts), self.min_indent)
        found = last | {"content": text}
        if self.returns_tokens:
            found["tokens"] = self._token_ids
        if self._logprobs:
            found["completion_probabilities"] = self._logprobs
        if not self.shown:
            return found
        picked = {name.rpartition("/")[2]: _at(found, name) for name in self.shown}
        return {name: value for name, value in picked.items() if value is not None}

    def _piece(self, text: str, token_ids: Sequence[int]) -> Json:
        return {
            "index": 0,
            "content": text,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self.usage.num_completion,
            "tokens_evaluated": self.usage.num_prompt,
        }

    def _end(self, choice: Json) -> Json:
        reason, stop = choice["finish_reason"], choice.get("stop_reason")
        kind = LIMIT if reason == "length" else NONE
        if reason == "stop":
            kind = WORD if isinstance(stop, str) else EOS
        params = self.job.request.params
        settings = {own: getattr(params, ours) for own, ours in SETTINGS.items()}
        settings |= {"seed": -1 if params.seed is None else params.seed, "stop": params.stop or []}
        return self._piece("", ()) | {
            "stop": True,
            "model": self.model,
            "generation_settings": settings,
            "prompt": self.job.prompt.text or "",
            "has_new_line": any("\n" in text for text in self._texts),
            "truncated": False,
            "stop_type": kind,
            "stopping_word": stop if kind == WORD else "",
            "tokens_cached": self.usage.num_prompt + self.usage.num_completion,
            "timings": timings(self.usage),
        }


def timings(usage: UsageCounter) -> Json:
    """Return the times of a text, with the cached part of its prompt counted separately."""
    times, num_prompt, num = usage.metrics, usage.num_prompt - usage.num_cached, 0
    prompt_ms = predicted_ms = 0.0
    if times is not None and times.first_token_s is not None:
        num = usage.num_completion
        prompt_ms = (times.first_token_s - times.arrival_s) * 1000
        predicted_ms = ((times.last_token_s or times.first_token_s) - times.first_token_s) * 1000
    found: Json = {"cache_n": usage.num_cached}
    for name, count, time_ms in (
        ("prompt", num_prompt, prompt_ms),
        ("predicted", num, predicted_ms),
    ):
        found |= {
            f"{name}_n": count,
            f"{name}_ms": round(time_ms, 3),
            f"{name}_per_token_ms": round(time_ms / count, 3) if count else 0.0,
            f"{name}_per_second": round(count / time_ms * 1000, 3) if time_ms else 0.0,
        }
    return found


def cut_at_indent(text: str, min_indent: int) -> str:
    """Return a text up to the first line, after the first one, with fewer blanks at its start.
    Empty lines do not end it."""
    if not min_indent:
        return text
    first, *rest = text.split("\n")
    kept = [first]
    for line in rest:
        if line.strip() and len(line) - len(line.lstrip()) < min_indent:
            break
        kept.append(line)
    return "\n".join(kept)


def _at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


async def events(answer: Answer, writer: CompletionWriter) -> AsyncGenerator[list[Json], None]:
    """Yield the events of each output that has any. The last one ends the request."""
    async with aclosing(answer.chunks()) as pieces:
        async for chunks in pieces:
            found: list[Json] = []
            for chunk in chunks:
                found += writer.of_chunk(chunk)
                if found and found[-1]["stop"]:
                    break
            if found:
                yield found
            if found and found[-1]["stop"]:
                return


async def whole(answer: Answer, writer: CompletionWriter) -> Json:
    """Return the whole answer."""
    last: Json = {}
    async with aclosing(events(answer, writer)) as found:
        async for each in found:
            last = each[-1]
    return writer.whole(last)


async def stream(answer: Answer, writer: CompletionWriter) -> AsyncGenerator[bytes, None]:
    """Yield the events of each output that has any, as bytes."""
    async with aclosing(events(answer, writer)) as found:
        async for each in found:
            yield b"".join(map(event, each))
