"""Messages between client and core, as typed structs with bounds.

They are encoded as msgpack and never pickled. A connection belongs to one client and one core, so
messages do not name their client.
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
    """Source of a prompt that begins with another request's tokens and shares their KV blocks."""

    request_id: str  # source request
    index: int  # number of the source sequence in its request
    num_tokens: int  # leading tokens of the source that the prompt shares
    takes_over: bool = False  # whether the source is released once the fork is retained
    num_items: int = 0  # media items among these tokens, which the source must have


class Request(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A tokenised prompt and its generation parameters, for the scheduler's door `add`.

    The core makes `params.num_samples` sequences, which differ by their index.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()  # all ids that end a sequence, including end tokens
    eos_token_ids: tuple[int, ...] = ()  # end tokens among stop_token_ids; they give no stop_reason
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str = ""  # requests share cached blocks only if their salts are equal
    adapter_id: str = ""  # digest of the adapter's files; empty for the base model
    received_s: float = 0.0  # arrival, on this machine's monotonic clock; 0.0: unknown
    hides_logprobs: bool = False  # logprobs serve only to rank best_of and are not returned
    tenant: str = ""  # user or API key; tenants share the engine evenly
    timeout_s: float = 0.0  # time after received_s until finish_reason `timeout`; 0.0: none
    is_open: bool = False  # whether more of the prompt arrives in `Append` messages
    # Seconds to pin the prompt; 0.0 until `Unpin`, None for an ordinary request. The engine
    # computes the prompt, samples no token, and ends the request with finish_reason `pinned`.
    pin_s: float | None = None
    pin_share: float = 1.0  # the tenant's share of pinnable and retainable memory, in (0, 1]
    core_id: int | None = None  # core that must serve the request; None: any core
    grammar: str = ""  # llguidance grammar of the answer (render/grammars/lark.py); empty: none
    pools: bool = False  # whether to pool the prompt; params then ask for one placeholder token
    keep_s: float = 0.0  # seconds to retain the ended request (scheduler/reuse/held.py)
    fork: Fork | None = None  # source to continue; the prompt includes the shared tokens
    kv_transfer: KVTransfer | None = None  # prefill for, or by, another engine
    adapter_path: str = ""  # the adapter's directory or GGUF file; empty without an adapter
    adapter_name: str = ""  # the adapter's name in metrics
    awaits_adapter: bool = False  # set by the core: wait for `AdapterReady`
    is_held_back: bool = False  # set by the core: wait for `GrammarReady`, as with a grammar
    # Images and videos of the prompt in order, with disjoint spans. A fork inherits the items of
    # its shared tokens and lists only later items.
    media: tuple[MediaItem, ...] = ()

    @property
    def marks(self) -> tuple[tuple[int, bytes], ...]:
        """Start index and digest of each media item."""
        return tuple((item.start, item.digest) for item in self.media)

    @property
    def spans(self) -> tuple[MediaItem, ...]:
        """The media items without pixels."""
        return tuple(item.without_pixels for item in self.media)

    def sets(self, fields: Iterable[str]) -> bool:
        """Return whether one of these fields differs from its default."""
        return any(getattr(self, name) != DEFAULTS_OF_REQUEST[name] for name in fields)

    def with_media(self, media: tuple[MediaItem, ...]) -> "Request":
        """Return the request with these media items."""
        return msgspec.structs.replace(self, media=media)


DEFAULTS_OF_REQUEST = {
    field.name: field.default for field in msgspec.structs.fields(Request) if not field.required
}


def without_prompt(request: Request) -> Request:
    """Return a copy of a request without its prompt tokens."""
    return msgspec.structs.replace(request, prompt_token_ids=[])


def with_priority(request: Request, priority: int) -> Request:
    """Return a copy of a request with another priority."""
    return msgspec.structs.replace(request, priority=priority)


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Control: end a request now."""

    request_id: str
    finish_reason: str = "abort"  # `abort`, `repetition`, or `stop` for a stop string
    index: int = -1  # sequence to end; -1: all sequences


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Control: end a request on behalf of an operator, with finish_reason `abort`. Its client is
    notified."""

    request_id: str


class Append(msgspec.Struct, frozen=True, tag=True):
    """Control: append tokens to an open prompt. Tokens for a request that has ended are dropped."""

    request_id: str
    token_ids: list[int]
    is_last: bool = False  # whether the prompt is now complete, so that generation may begin


class Steer(msgspec.Struct, frozen=True, tag=True):
    """Control: change a request's priority, pause it or resume it. Ended requests are ignored."""

    request_id: str
    priority: int | None = None  # None: unchanged
    pause_s: float | None = None  # seconds until it resumes by itself; 0.0: now; None: unchanged


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Control: stop using all blocks cached so far, in memory and in stores. Running requests keep
    their blocks.

    epoch: a unique text, which becomes part of the names of all later blocks."""

    epoch: str = msgspec.field(default_factory=lambda: secrets.token_hex(16))


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """Control: compute nothing more, or continue. Frozen requests keep their blocks."""

    is_frozen: bool


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """Control: remove a pin."""

    request_id: str  # request that pinned the prefix
    tenant: str | None = None  # required tenant of the pin; None: any tenant


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Control: retain a request for a number of seconds."""

    request_id: str
    keep_s: float  # seconds from now, or from the request's end if it still runs; 0.0: release it
    tenant: str | None = None  # required tenant of the request; None: any tenant


class PutBack(msgspec.Struct, frozen=True, tag=True):
    """Control: restore a sequence that an earlier engine retained, without its blocks.

    The core reads these messages from a file. Clients cannot send them."""

    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    keep_s: float
    left_s: float  # seconds until the release
    tenant: str
    cache_salt: str
    adapter_id: str = ""


class Rewind(msgspec.Struct, frozen=True, tag=True):
    """Control: cut a retained sequence back to its first num_tokens tokens."""

    request_id: str
    index: int
    num_tokens: int
    tenant: str | None = None  # required tenant of the request; None: any tenant


class MeasuredRates(msgspec.Struct, frozen=True, tag=True):
    """Control: measured rates of the device; 0.0: unknown."""

    prefill_tokens_per_s: float = 0.0
    copy_bytes_per_s: float = 0.0
    step_tokens: int = 0  # token budget of a step that meets its time limit; 0: as configured


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Draft tokens to follow the first `num_known` tokens of one sequence."""

    request_id: str
    index: int
    num_known: int
    token_ids: list[int]


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """Control: draft tokens to verify in each sequence's next plan. Drafts that follow other tokens
    than the sequence's known ones are dropped.

    on_device: the device proposes the draft tokens. Only the number of `token_ids` counts, in the
        next plan only and for any known tokens.
    """

    drafts: list[Draft]
    on_device: bool = False


class KeepCached(msgspec.Struct, frozen=True, tag=True):
    """Control: copy cached blocks to stores in the next plans, because the engine shuts down."""


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """Control: let a request run, because its grammar is compiled or another awaited part is
    loaded."""

    request_id: str
    error: str | None = None  # reason for a failure, which ends the request


class AdapterReady(msgspec.Struct, frozen=True, tag=True):
    """Control: let a request run, because its adapter is on the device."""

    request_id: str
    error: str | None = None  # reason for a failure, which ends the request


Control = (
    Abort
    | Cancel
    | Append
    | Steer
    | ResetPrefixCache
    | Freeze
    | Unpin
    | Hold
    | PutBack
    | Rewind
    | MeasuredRates
    | KeepCached
    | GrammarReady
    | AdapterReady
    | Drafted
    | Answer
)


class GetMetrics(msgspec.Struct, frozen=True, tag=True):
    """Client to core: request the metrics in Prometheus' text format. The reply is `Metrics`."""

    question_id: int


class GetTimeline(msgspec.Struct, frozen=True, tag=True):
    """Client to core: request the timeline of a request. The reply is `TimelineText`."""

    question_id: int
    request_id: str
    tenant: str | None = None  # required tenant of the request; None: any tenant


class GetPrefixes(msgspec.Struct, frozen=True, tag=True):
    """Client to core: list pinned prefixes. The reply is `Prefixes`."""

    question_id: int
    tenant: str | None = None  # tenant of the prefixes; None: all tenants


class GetRetained(msgspec.Struct, frozen=True, tag=True):
    """Client to core: list retained requests. The reply is `HeldList`.

    With a request_id, the reply holds only that request with its tokens, and it may still run. An
    id without the suffix `-0` also matches, since the suffix marks a response's first prompt.
    """

    question_id: int
    request_id: str | None = None
    index: int = 0  # number of the sequence in the request
    tenant: str | None = None  # tenant of the requests; None: all tenants


class CancelRequests(msgspec.Struct, frozen=True, tag=True):
    """Client to core: cancel requests. The reply is `Cancelled`.

    An id also matches with a number as suffix, since such ids belong to a response's prompts."""

    question_id: int
    request_ids: list[str] | None = None  # None: all requests
    tenant: str | None = None  # tenant of the requests; None: all tenants

    def matches(self, request: "Request") -> bool:
        """Return whether this request is to be cancelled. Pins never are."""
        if request.pin_s is not None or self.tenant not in (None, request.tenant):
            return False
        names, (head, _, number) = self.request_ids, request.request_id.rpartition("-")
        return (
            names is None or request.request_id in names or (number.isdecimal() and head in names)
        )


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Client to core: replace the model's weights. The reply is `Done`; then later tokens are made
    by the new weights."""

    question_id: int
    path: str  # directory or file that the core's process can read
    version: str  # name of the new weights in outputs
    is_partial: bool = False  # the path has some of the tensors, or deltas; the rest stays


class SetPause(msgspec.Struct, frozen=True, tag=True):
    """Client to core: stop making plans, or continue. The reply is `Done`, once no step runs."""

    question_id: int
    is_paused: bool | None  # None: only report the state
    drains: bool = False  # finish the present requests first; later ones wait


WEIGHTS, KV_CACHE = SLEEPING_PARTS = ("weights", "kv_cache")  # memory that a sleep gives back


class SetSleep(msgspec.Struct, frozen=True, tag=True):
    """Client to core: give memory back, or take it again; without a level and parts, only report.
    The reply is `Done`."""

    question_id: int
    level: int = 0  # 1: free the KV memory; 2: also the weights; 0: do not begin to sleep
    aborts: bool = True  # end the present requests, instead of letting them finish first
    wakes: list[str] = []  # parts to wake, of SLEEPING_PARTS


class GetLive(msgspec.Struct, frozen=True, tag=True):
    """Client to core: request a snapshot of the engine. The reply is `Live`."""

    question_id: int


ToCore = (
    Request
    | Abort
    | Append
    | Steer
    | ResetPrefixCache
    | Unpin
    | Hold
    | Rewind
    | GetMetrics
    | GetTimeline
    | GetPrefixes
    | GetRetained
    | CancelRequests
    | GetLive
    | UpdateWeights
    | SetPause
    | SetSleep
)


class PinnedPrefix(msgspec.Struct, frozen=True):
    """A pinned prefix."""

    id: str
    num_tokens: int
    num_blocks: int
    is_ready: bool  # KV blocks that the pin holds; 0 until it is ready
    age_s: float
    expires_in_s: float | None  # None: the pin does not expire
    num_hits: int  # prefix hits; tenants see only the hits of their own requests


class RetainedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence that can be forked."""

    id: str
    index: int
    num_prompt_tokens: int
    num_tokens: int
    num_blocks: int  # KV blocks on the device
    keep_s: float
    tenant: str
    cache_salt: str
    expires_in_s: float | None = None  # None: the sequence still runs
    tokens: bytes = b""  # int32, prompt and output; empty unless requested
    core_id: int | None = None  # core that holds the sequence, if there are several
    adapter_id: str = ""
    media: tuple[MediaItem, ...] = ()  # items of the prompt, without pixels

    @property
    def token_ids(self) -> list[int]:
        return array.array("i", self.tokens).tolist()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Core to client, first on every connection: description of the engine and its limits."""

    client_id: int
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_num_seqs: int  # maximum number of running sequences, hence also per request
    settings: dict[str, Any]  # effective configuration, flat (`quire.base.settings.config`)
    memory: str  # memory plan as one line
    pooling: PoolingSpec | None = None  # pooling of the model; None: the model generates
    architecture: str = ""  # the model's type in its config
    weights_bytes: int = 0  # size of the weights on one device
    weights_version: str = ""  # of the weights in use; empty until an update
    numerics: dict[str, str] = {}  # all that determines bits, by part (`base/requests/numerics.py`)


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Core to client: a rejected request with the reason."""

    request_id: str
    message: str
    is_busy: bool = False  # whether the only reason is the load of other requests
    field: str | None = None  # invalid field (`RequestError.field`)
    code: str | None = None  # code for programs (`RequestError.code`)


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `GetMetrics`."""

    question_id: int
    text: str


class TimelineText(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `GetTimeline`, as JSON; empty for an unknown request."""

    question_id: int
    text: str


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `GetPrefixes`, oldest first."""

    question_id: int
    prefixes: list[PinnedPrefix]


class HeldList(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `GetRetained`, oldest first."""

    question_id: int
    requests: list[RetainedRequest]


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `CancelRequests`, with the ids of the requests that end."""

    question_id: int
    request_ids: list[str]


class Done(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to an order that takes time."""

    question_id: int
    error: str | None = None  # why it failed; None: it succeeded
    weights_version: str = ""  # of the new weights (`UpdateWeights`)
    is_paused: bool = False  # now (`SetPause`)
    is_sleeping: bool = False  # now (`SetSleep`)


class WeightsChanged(msgspec.Struct, frozen=True, tag=True):
    """Core to client: tokens after this message are made by these weights."""

    version: str
    digest: str = ""  # of the weights, as in `Ready.numerics`


class Live(msgspec.Struct, frozen=True, tag=True):
    """Core to client: the reply to `GetLive`. The last frame is repeated if a new one is not due
    yet."""

    question_id: int
    frame: LiveFrame


FromCore = (
    Ready
    | StepOutputs
    | Refused
    | Metrics
    | TimelineText
    | Prefixes
    | HeldList
    | Cancelled
    | Done
    | WeightsChanged
    | Live
)
