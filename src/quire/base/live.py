"""What an engine is doing at one moment, for those who watch it: numbers and ids, never a text.

A request is told by its number, which goes up with arrival, so that blocks of one request can be
drawn alike for as long as it lives.
"""

import msgspec

from quire.base.plan import Int32

FREE, CACHED, USED, PINNED, HELD = range(5)
STATES = ("free", "cached", "used", "pinned", "held")
NOBODY = -1


class BlockMap(msgspec.Struct, frozen=True):
    """The KV blocks of one cache group.

    owners: [B] number of the oldest request that holds the block, or NOBODY; sharers: [B] how many
    hold it; states: [B] FREE; CACHED: nobody holds it, but the prefix cache knows it; USED; PINNED:
    a pinned prefix holds it, perhaps with others; HELD: a held request does, or a fork that waits.
    """

    kind: str
    owners: Int32
    sharers: Int32
    states: Int32


class RunningRow(msgspec.Struct, frozen=True):
    """A sequence that holds a row. index: which of its request's. num_known_tokens: prompt and
    output; num_blocks: of the largest of its tables."""

    id: str
    number: int
    index: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_known_tokens: int
    limit: int
    num_cached_tokens: int
    num_preemptions: int
    num_blocks: int
    tenant: str


class WaitingRow(msgspec.Struct, frozen=True):
    """A sequence that waits. reason: a key of REASONS."""

    id: str
    number: int
    index: int
    num_known_tokens: int
    num_preemptions: int
    is_swapped: bool
    arrival_s: float
    reason: str
    tenant: str


class PinnedRow(msgspec.Struct, frozen=True):
    """A prefix that is pinned and computed. num_blocks: of the largest of its tables."""

    id: str
    num_tokens: int
    num_blocks: int
    num_hits: int
    tenant: str


class HeldRow(msgspec.Struct, frozen=True):
    """A sequence of a request that has ended and is held. num_blocks: 0 if they were given up;
    ends_s: when it is let go, on the clock of the frames."""

    id: str
    index: int
    num_tokens: int
    num_blocks: int
    ends_s: float
    tenant: str


class HostMemory(msgspec.Struct, frozen=True):
    """Blocks of host memory, over all cache groups. num_swapped: of sequences that gave way, or in
    use by a plan; num_cached: evicted by the device and still known."""

    num_blocks: int
    num_swapped: int
    num_cached: int


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
    """A step whose result is in. prefill_tokens: of rows that compute more than one token;
    decode_tokens: of the others; num_sampled: tokens that came out of it."""

    number: int
    at_s: float
    prefill_tokens: int
    decode_tokens: int
    num_sampled: int
    duration_s: float


class BlockEvent(msgspec.Struct, frozen=True):
    """What happened to a block. kind: hit, copy, swap_out or load; block: of the device."""

    number: int
    kind: str
    group: int
    block: int


class LiveState(msgspec.Struct, frozen=True):
    """What the scheduler holds. waiting: the first ones; num_waiting: all that wait in the queue or
    for what they lack. held: the first ones; num_held: all. num_evicted: blocks that have lost
    their name since the start."""

    groups: list[BlockMap]
    running: list[RunningRow]
    waiting: list[WaitingRow]
    num_waiting: int
    pinned: list[PinnedRow]
    held: list[HeldRow]
    num_held: int
    host: HostMemory
    num_rows: int
    block_size: int
    token_budget: int
    num_evicted: int


class LiveFrame(msgspec.Struct, frozen=True):
    """One frame. number: goes up with each that is made. steps, events: the last ones, by their
    numbers, so that who has missed a frame may still know them. counts: what happened since
    somebody began to watch, by kind of event."""

    number: int
    at_s: float
    state: LiveState
    steps: list[StepRow]
    events: list[BlockEvent]
    counts: dict[str, int]
