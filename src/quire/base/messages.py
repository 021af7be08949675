"""Messages between client and core. Typed, bounded, encoded as msgpack; never pickled.

Whose a message is follows from the connection that it comes over: one client's to one core.
"""

import array
import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from quire.base.kv_orders import Answer
from quire.base.live import LiveFrame
from quire.base.requests.media_items import MediaItem
from quire.base.requests.pooling import PoolingSpec
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.kv_transfer import KVTransfer
from quire.base.step_outputs import StepOutputs


class Fork(msgspec.Struct, frozen=True):
    """That a prompt begins with the first num_tokens tokens of another request, whose KV blocks it
    shares.

    index: which of the other one's sequences. takes_over: once this one has ended and is held, the
    other one is held no longer. num_items: media items among these tokens, which it must have.
    """

    request_id: str
    index: int
    num_tokens: int
    takes_over: bool = False
    num_items: int = 0


class Request(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A prompt in tokens and how to continue it. The first of the four doors takes these.

    The core makes `params.num_samples` sequences of it, told apart by their index.

    is_open: more of the prompt comes by `Append`.
    pin_s: compute the prompt, sample nothing, and keep it: the request ends with finish_reason
    `pinned`, and the prompt stays for so many seconds, with 0.0 until `Unpin`; None is an ordinary
    request. pin_share: of what may be pinned or held, how much its tenant's may be, in (0, 1].
    keep_s: when it has come to its end, its tokens and blocks are held for so many seconds
    (`scheduler/reuse/held.py`). fork: what it goes on from; the prompt holds those tokens too.
    received_s: when the front end got it, on this machine's monotonic clock; 0.0 is not known.
    stop_token_ids: all ids that end it (end of sequence unless ignored, and the caller's).
    eos_token_ids: those of them that are end of sequence, which give no stop_reason.
    cache_salt: only requests with an equal salt share cached blocks.
    hides_logprobs: they are there for the order of best_of, the caller wants none.
    tenant: whom it is for; tenants share the engine evenly. timeout_s: seconds after it was
    received when it is of no use any more, and ends with finish_reason `timeout`; 0.0 is never.
    core_id: of several cores, the one that it must go to; None: whichever suits it best.
    grammar: what its answer must be, as llguidance reads it (`render/grammars/lark.py`); empty:
    anything. pools: what is asked for is what the prompt comes to, of a model that pools; params
    ask for one token, which stands for it. kv_transfer: its prompt is computed for another engine,
    or was by another one. is_held_back: the core sets it: the request waits for `GrammarReady`, as
    one with a grammar. media: the images and videos in the prompt, in its order; their spans do not
    overlap. A fork inherits those of the tokens that it shares, and lists only those after them.
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
    received_s: float = 0.0
    hides_logprobs: bool = False
    tenant: str = ""
    timeout_s: float = 0.0
    is_open: bool = False
    pin_s: float | None = None
    pin_share: float = 1.0
    core_id: int | None = None
    grammar: str = ""
    pools: bool = False
    keep_s: float = 0.0
    fork: Fork | None = None
    kv_transfer: KVTransfer | None = None
    is_held_back: bool = False
    media: tuple[MediaItem, ...] = ()

    @property
    def marks(self) -> tuple[tuple[int, bytes], ...]:
        """Where its media items start, and their digests."""
        return tuple((item.start, item.digest) for item in self.media)

    @property
    def spans(self) -> tuple[MediaItem, ...]:
        """Its media items without pixels."""
        return tuple(item.without_pixels for item in self.media)

    def sets(self, fields: Iterable[str]) -> bool:
        """Return whether one of these fields differs from its default."""
        return any(getattr(self, name) != DEFAULTS_OF_REQUEST[name] for name in fields)

    def with_media(self, media: tuple[MediaItem, ...]) -> "Request":
        """Return the request with these items."""
        return msgspec.structs.replace(self, media=media)


DEFAULTS_OF_REQUEST = {
    field.name: field.default for field in msgspec.structs.fields(Request) if not field.required
}


def without_prompt(request: Request) -> Request:
    """Return a request as it is, without the tokens of its prompt."""
    return msgspec.structs.replace(request, prompt_token_ids=[])


def with_priority(request: Request, priority: int) -> Request:
    """Return a request with another priority."""
    return msgspec.structs.replace(request, priority=priority)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Control: end a request now. finish_reason is `abort`, `stop` for a stop string, or
    `repetition`.

    index: the sequence of the request that ends; -1 is all of them.
    """

    request_id: str
    finish_reason: str = "abort"
    index: int = -1


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Control: end a request now, for somebody else than its client, which is told: its
    finish_reason is `abort`."""

    request_id: str


class Append(msgspec.Struct, frozen=True, tag=True):
    """Control: the next piece of a prompt that is open; with is_last it is complete, and the answer
    begins. A piece for a request that has ended is dropped."""

    request_id: str
    token_ids: list[int]
    is_last: bool = False


class Steer(msgspec.Struct, frozen=True, tag=True):
    """Control: change the priority of a request, or pause it. A request that has ended is ignored.

    priority: None leaves it. pause_s: seconds until the request resumes by itself; 0.0 resumes it
    now, None changes nothing.
    """

    request_id: str
    priority: int | None = None
    pause_s: float | None = None


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Control: nothing that was cached before is used any more, in stores neither. Running requests
    keep their blocks. epoch: a word that nobody used before; it is part of all names to come."""

    epoch: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """Control: a pinned prefix is not needed any more. request_id: of the request that pinned it;
    tenant: whose it must be, None is anybody's."""

    request_id: str
    tenant: str | None = None


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Control: hold a request for so many seconds from now on, or if it has not ended, from its end
    on; 0.0: let it go. tenant: whose it must be, None is anybody's."""

    request_id: str
    keep_s: float
    tenant: str | None = None


class PutBack(msgspec.Struct, frozen=True, tag=True):
    """Control: a sequence that an engine before this one held is held again, without blocks, for
    left_s more seconds. From a file, never from a client."""

    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    keep_s: float
    left_s: float
    tenant: str
    cache_salt: str
    adapter_id: str = ""


class Rewind(msgspec.Struct, frozen=True, tag=True):
    """Control: of a held sequence only the first num_tokens tokens are left. tenant: whose it must
    be, None is anybody's."""

    request_id: str
    index: int
    num_tokens: int
    tenant: str | None = None


class MeasuredRates(msgspec.Struct, frozen=True, tag=True):
    """Control: what the device was measured to do. 0.0 is not known. step_tokens: what a step has
    time for; 0 is as many as are configured."""

    prefill_tokens_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    step_tokens: int = 0


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Guesses at what follows the first `num_known` tokens of one of a request's sequences."""

    request_id: str
    index: int
    num_known: int
    token_ids: list[int]


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """Control: what sequences may try in the next plan that they are in. Guesses at what follows
    other tokens than those that are known then are forgotten.

    on_device: the device makes them, as many as there are ids, in the next plan only and whatever
    is known then.
    """

    drafts: list[Draft]
    on_device: bool = False


class KeepCached(msgspec.Struct, frozen=True, tag=True):
    """Control: the engine ends; plans to come copy out what is cached, for stores to keep."""


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """Control: a request's grammar is compiled, or what it was held back for is there, so it may
    run. error: why not; then the request ends with it."""

    request_id: str
    error: str | None = None


Control = (
    Abort
    | Cancel
    | Append
    | Steer
    | ResetPrefixCache
    | Unpin
    | Hold
    | PutBack
    | Rewind
    | MeasuredRates
    | KeepCached
    | GrammarReady
    | Drafted
    | Answer
)


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    """Client to core: send the metrics, in Prometheus' text format. Answered by `Metrics`."""

    ask_id: int


class AskTimeline(msgspec.Struct, frozen=True, tag=True):
    """Client to core: what happened to this request? Answered by `TimelineText`. tenant: whose it
    must be; None is anybody."""

    ask_id: int
    request_id: str
    tenant: str | None = None


class AskPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Client to core: what is pinned? Answered by `Prefixes`. tenant: whose; None is anybody's."""

    ask_id: int
    tenant: str | None = None


class AskHeld(msgspec.Struct, frozen=True, tag=True):
    """Client to core: what is held? Answered by `HeldList`. tenant: whose; None is anybody's.

    request_id: only this one, held or not ended, with its tokens; also if it is called like this
    with `-0` behind, as an answer's first prompt is. index: of its sequences.
    """

    ask_id: int
    request_id: str | None = None
    index: int = 0
    tenant: str | None = None


class AskCancel(msgspec.Struct, frozen=True, tag=True):
    """Client to core: end requests, whoever's they are. Answered by `Cancelled`. request_ids: also
    those that are called like one of these with a number behind, as an answer's prompts are; None
    is all. tenant: whose they must be; None is anybody's."""

    ask_id: int
    request_ids: list[str] | None = None
    tenant: str | None = None

    def means(self, request: "Request") -> bool:
        """Tell whether this request is to end; pins are no requests to who asks."""
        if request.pin_s is not None or self.tenant not in (None, request.tenant):
            return False
        names, (head, _, number) = self.request_ids, request.request_id.rpartition("-")
        return (
            names is None or request.request_id in names or (number.isdecimal() and head in names)
        )


class AskLive(msgspec.Struct, frozen=True, tag=True):
    """Client to core: what is it doing? Answered by `Live`."""

    ask_id: int


ToCore = (
    Request
    | Abort
    | Append
    | Steer
    | ResetPrefixCache
    | Unpin
    | Hold
    | Rewind
    | AskMetrics
    | AskTimeline
    | AskPrefixes
    | AskHeld
    | AskCancel
    | AskLive
)


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A prefix that is kept. num_blocks: KV blocks that it holds, 0 until it is ready.
    expires_in_s: None is never. num_hits: requests that began with it; a
    tenant is told of its own ones."""

    id: str
    num_tokens: int
    num_blocks: int
    is_ready: bool
    age_s: float
    expires_in_s: float | None
    num_hits: int


class HeldRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence that may be forked. num_blocks: KV blocks of the device that it has. expires_in_s:
    None while it has not ended. tokens: int32, prompt and output, if they were asked for. core_id:
    of several cores, the one that has it. media: the items of its prompt, without pixels."""

    id: str
    index: int
    num_prompt_tokens: int
    num_tokens: int
    num_blocks: int
    keep_s: float
    tenant: str
    cache_salt: str
    expires_in_s: float | None = None
    tokens: bytes = b""
    core_id: int | None = None
    adapter_id: str = ""
    media: tuple[MediaItem, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return array.array("i", self.tokens).tolist()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core to client, first on every connection: what this engine is and what it can serve.

    max_num_seqs: sequences that can run at the same time, so also those of one request.
    settings: the effective configuration, flat (`quire.base.settings.config`). memory: the memory
    plan as one line. pooling: how the model pools; None: it generates.
    """

    client_id: int
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int
    settings: dict[str, Any]
    memory: str
    pooling: PoolingSpec | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Core to client: a request that was not queued, and why. is_busy: only because of others;
    field, code: what of it is wrong (`RequestError`)."""

    request_id: str
    message: str
    is_busy: bool = False
    field: str | None = None
    code: str | None = None


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskMetrics`."""

    ask_id: int
    text: str


class TimelineText(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskTimeline`, as JSON; empty for an unknown request."""

    ask_id: int
    text: str


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskPrefixes`, oldest first."""

    ask_id: int
    prefixes: list[PinnedPrefix]


class HeldList(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskHeld`, oldest first."""

    ask_id: int
    requests: list[HeldRequest]


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskCancel`: the requests that end."""

    ask_id: int
    request_ids: list[str]


class Live(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the answer to `AskLive`; the last frame again if it is too early for one."""

    ask_id: int
    frame: LiveFrame


FromCore = (
    Ready | StepOutputs | Refused | Metrics | TimelineText | Prefixes | HeldList | Cancelled | Live
)
