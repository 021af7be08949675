"""Messages between client and core. Typed, bounded, encoded as msgpack; never pickled.

Every message names its client and its core, so that many clients can speak to many cores.
"""

import msgspec

from quire.base.plan import Candidates
from quire.base.sampling_params import SamplingParams


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt in tokens and how to continue it. The first of the four doors takes these.

    stop_token_ids: all ids that end it (end of sequence unless ignored, and the caller's).
    eos_token_ids: those of them that are end of sequence, which give no stop_reason.
    cache_salt: only requests with an equal salt share cached blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""
    adapter_id: str = ""
    media_ids: tuple[str, ...] = ()
    client_id: int = 0
    core_id: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Control: end a request now. finish_reason is `abort`, or `stop` for a stop string."""

    request_id: str
    finish_reason: str = "abort"


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Control: forget all cached prefixes. Running requests keep their blocks."""


Control = Abort | ResetPrefixCache


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one request.

    One is made per request and step, and none can be part of a cycle: the garbage collector need
    not look at them (a quarter less time to make them, and fewer collections).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    candidates: list[Candidates] | None = None
    prompt_candidates: list[Candidates] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
