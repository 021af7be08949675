"""A snapshot of an engine for observers: numbers and ids, never text.

Each request has a number that increases with arrival. A request's blocks keep its number, so that
they can be drawn in one colour.
"""

import msgspec

from quire.base.plan import Int32

FREE, CACHED, USED, PINNED, HELD = range(5)
STATES = ("free", "cached", "used", "pinned", "held")
NO_OWNER = -1


class BlockMap(msgspec.Struct, frozen=True):
    """The KV blocks of one cache group; B is the number of blocks."""

    kind: str
    owners: Int32  # [B] number of the oldest request that holds the block, or `NO_OWNER`
    sharers: Int32  # [B] number of requests that hold the block
    # [B] FREE; CACHED: only the prefix cache knows it; USED: a request holds it. PINNED: a pinned
    # prefix holds it, perhaps with requests. HELD: a retained request or a waiting fork holds it.
    states: Int32


class RunningRow(msgspec.Struct, frozen=True):
    """A sequence that holds a row."""

    id: str
    number: int
    index: int  # number of the sequence in its request
    num_prompt_tokens: int
    num_computed_tokens: int
    num_known_tokens: int  # prompt and output
    limit: int
    num_cached_tokens: int
    num_preemptions: int
    num_blocks: int  # blocks of its largest block table
    tenant: str


class WaitingRow(msgspec.Struct, frozen=True):
    """A sequence that waits."""

    id: str
    number: int
    index: int
    num_known_tokens: int
    num_preemptions: int
    is_swapped: bool
    arrival_s: float
    reason: str  # a key of REASONS
    tenant: str


class PinnedRow(msgspec.Struct, frozen=True):
    """A pinned prefix whose blocks are computed."""

    id: str
    num_tokens: int
    num_blocks: int  # blocks of its largest block table
    num_hits: int
    tenant: str


class RetainedRow(msgspec.Struct, frozen=True):
    """A sequence of a retained request."""

    id: str
    index: int
    num_tokens: int
    num_blocks: int  # 0 if its blocks were dropped
    ends_s: float  # time of its release, on the frames' clock
    tenant: str


class HostMemory(msgspec.Struct, frozen=True):
    """Blocks of host memory, over all cache groups."""

    num_blocks: int
    num_swapped: int  # blocks of preempted sequences, or in use by a plan
    num_cached: int  # blocks that the device evicted and that can still be found


REASONS = {
    "grammar": "its grammar is being compiled",
    "loading": "a part of the engine that it needs is being loaded",
    "prompt": "the rest of its prompt has not arrived yet",
    "store": "its blocks are being looked up in a store",
    "result": "its last step has not finished",
    "suspect": "a step with it failed; it will run alone",
    "rows": "all rows are in use (max_num_seqs)",
    "blocks": "not enough KV blocks are free for it and for the growth of running requests",
    "turn": "it will be admitted in one of the next steps",
    "behind": "it waits for an earlier request, which later requests cannot overtake",
}


class StepRow(msgspec.Struct, frozen=True):
    """A step whose result arrived."""

    number: int
    at_s: float
    prefill_tokens: int  # tokens of rows that compute more than one token
    decode_tokens: int  # tokens of the other rows
    num_sampled: int  # tokens that the step sampled
    duration_s: float


class BlockEvent(msgspec.Struct, frozen=True):
    """An event that concerned one block."""

    number: int
    kind: str  # hit, copy, swap_out or load
    group: int
    block: int  # block of the device


class LiveState(msgspec.Struct, frozen=True):
    """The state of the scheduler."""

    groups: list[BlockMap]
    running: list[RunningRow]
    waiting: list[WaitingRow]  # the first waiting sequences
    num_waiting: int  # all sequences that are queued or parked
    pinned: list[PinnedRow]
    held: list[RetainedRow]  # the first retained sequences
    num_held: int  # all retained sequences
    host: HostMemory
    num_rows: int
    block_size: int
    token_budget: int
    num_evicted: int  # evicted blocks since the start


class LiveFrame(msgspec.Struct, frozen=True):
    """One frame of the live view.

    Steps and events are numbered, and a frame holds the last of them, so that an observer may miss
    frames."""

    number: int  # increases with each frame
    at_s: float
    state: LiveState
    steps: list[StepRow]
    events: list[BlockEvent]
    counts: dict[str, int]  # events by kind since the first observer began to watch
