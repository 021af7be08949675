"""Redaction of recordings that do not record tokens: the same run without the clients' text.

    token ids            as many zeros; a sampled token is NEUTRAL unless it ends its sequence
    digests, salts, ...  keyed BLAKE2b with a random key, never written. Equal values stay equal
    images               spans and keyed digests, without pixels
    texts, logit bias    nothing: the scheduler does not read them
    request ids, stop ids, numbers, times: unchanged

A field without a rule is treated by its type: text is keyed, lists of token ids become zeros.
"""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.base.messages import Request
from quire.base.plan import Candidates
from quire.base.requests.media_items import MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.scheduler.scheduler import Scheduler

NEUTRAL = -2  # replaces a token that does not end its sequence; -1 pads lists of stop ids
DIGEST_BYTES = 16
NUMBERS = frozenset({type(None), bool, int, float})
BLANK = ("tokens", "saved_tokens", "token_ids", "prompt_token_ids")  # in the scheduler's state
PLAIN = {"request_id", "for_request_id", "near_id", "finish_reason", "kind", "miss"}
PLAIN_IDS = {"stop_token_ids", "eos_token_ids"}
DROPPED = {
    "stop", "bad_words", "bad_words_token_ids", "logit_bias", "allowed_token_ids",
    "structured_outputs", "dry_sequence_breakers", "dry_breaker_token_ids", "logits_processors",
}  # fmt: skip
WORDS = frozenset(
    {"full", "window", "copy", "load", "swap_out", "stop", "length", "abort", "error", "timeout"}
    | {"never", "auto", "pinned"}
    | {
        word
        for config in (ModelConfig, CacheConfig, SchedulerConfig, EngineConfig)
        for item in dataclasses.fields(config)
        for word in item.metadata.get("choices", ())
    }
)
ERROR_TYPE = re.compile(r"^[a-z ]+: [A-Za-z_.]+(?=:|$)")


@dataclass(frozen=True)
class Context:
    """Context for redacting a snapshot. request_ids: texts that are request ids and stay unchanged.
    requests: requests that may still sample tokens. stops: stop token ids of beam searches, by the
    Python id of their candidates."""

    request_ids: frozenset[str]
    requests: list[Request]
    stops: dict[int, frozenset[int]]

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Context":
        lifecycle, in_flight = scheduler.lifecycle, scheduler.planner.in_flight
        sequences = [
            *lifecycle.sequences.values(),
            *(s for step in in_flight for s in step.sequences),
        ]
        groups = [s.group for s in sequences if s.group is not None]
        stops = {
            id(found): group.search.stop_token_ids
            for group in groups
            if group.search is not None
            for found in group.candidates.values()
        }
        held = {*scheduler.retained.by_id, *scheduler.retained.branches}
        names = frozenset({*lifecycle.sequences, *scheduler.pinned.by_id, *held})
        return cls(names, [s.request for s in sequences], stops)


class Redaction:
    """Redaction of one recording, used by the writer's thread only. key: random if None; empty for
    values that are keyed already (a replay)."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key
        self._may_stop = np.zeros(0, bool)  # [max stop id + 1] ids that end some sequence
        self._context = Context(frozenset(), [], {})

    def begin(self, context: "Context") -> None:
        """Prepare for redacting a snapshot."""
        self._context = context
        for request in context.requests:
            self.take_stops(request)

    def take_stops(self, request: Request) -> None:
        """Note the stop token ids of a request, which may be sampled from now on."""
        ids = [token_id for token_id in request.stop_token_ids if token_id >= 0]
        if not ids:
            return
        if max(ids) >= len(self._may_stop):
            grown = np.zeros(max(ids) + 1, bool)
            grown[: len(self._may_stop)] = self._may_stop
            self._may_stop = grown
        self._may_stop[ids] = True

    def may_stop(self, token_ids: Any) -> Any:
        """Return for token ids [num_tokens] whether each is a stop id of some request, as bool."""
        size = len(self._may_stop)
        if size == 0:
            return np.zeros(len(token_ids), bool)
        known = (token_ids >= 0) & (token_ids < size)
        return known & self._may_stop[np.where(known, token_ids, 0)]

    def data(self, value: bytes) -> bytes:
        """Digest data with the key: equal values stay equal, and cannot be found by trying."""
        if not self._key:
            return value
        return hashlib.blake2b(value, key=self._key, digest_size=DIGEST_BYTES).digest()

    def text(self, value: str) -> str:
        if not self._key or not value or value in WORDS or value in self._context.request_ids:
            return value
        return "~" + self.data(value.encode("utf-8", "surrogatepass")).hex()

    def error(self, message: str) -> str:
        """Return the type of an error message, without its details."""
        found = ERROR_TYPE.match(message)
        return found[0] if found else "failed"

    def candidates(self, value: Candidates, stops: Iterable[int]) -> Candidates:
        """Return a beam search's candidates with their order and scores, but only stop ids as
        token ids."""
        keeps = np.isin(value.token_ids, list(stops))
        ids = np.where(keeps, value.token_ids, NEUTRAL).astype(np.int32)
        return Candidates(ids, value.logprobs, 0)

    def value(self, value: Any, name: str = "") -> Any:
        """Return a redacted copy of a message, plan or other value. name: the attribute that has
        the value."""
        if type(value) in NUMBERS:
            return value
        if isinstance(value, str):
            return value if name in PLAIN else self.text(value)
        if isinstance(value, bytes):
            return self.data(value)
        is_tokens = "token_ids" in name and name not in PLAIN_IDS
        if isinstance(value, np.ndarray):
            return np.zeros_like(value) if is_tokens else value
        if isinstance(value, list | tuple):
            if name in DROPPED:
                return type(value)()
            return type(value)([0] * len(value) if is_tokens else map(self.value, value))
        if isinstance(value, dict):
            return {self.value(key): self.value(item, name) for key, item in value.items()}
        if isinstance(value, Candidates):
            return self.candidates(value, self._context.stops.get(id(value), ()))
        if isinstance(value, MediaItem):
            return msgspec.structs.replace(value.without_pixels, digest=self.data(value.digest))
        if isinstance(value, SamplingParams):
            if any(getattr(value, n) for n in DROPPED_PARAMS):
                return msgspec.structs.replace(value, **dict.fromkeys(DROPPED_PARAMS))
            return value
        if isinstance(value, msgspec.Struct):
            fields = {n: self.value(getattr(value, n), n) for n in value.__struct_fields__}
            return type(value)(**fields)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [item.name for item in dataclasses.fields(value)]
            return type(value)(**{n: self.value(getattr(value, n), n) for n in names})
        return value


DROPPED_PARAMS = [
    *(name for name in SamplingParams.__struct_fields__ if name in DROPPED), "stop_token_ids",
]  # fmt: skip
