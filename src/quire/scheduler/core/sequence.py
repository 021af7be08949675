"""State of sequences: `RowTable`, one array per number, indexed by row; `Sequence` views one row.

A sequence's progress is `computed` chasing `total` (T 4.4.2). `total` counts the prompt, the known
output and the pending tokens, which plans in flight will sample; `known` excludes pending tokens. A
sequence without a row stores its known tokens itself and has no computed tokens.

    token index   0 ........ prompt ........ known ...... total ......... limit
                  |-- computed -->|          |- pending -|    not sampled yet |

 Only `rows.py` assigns columns. Only `lifecycle.py` assigns `Sequence.state`.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.base.messages import Request
from quire.base.plan import Candidates
from quire.base.prefix import PrefixReport
from quire.base.requests.sampling_params import SamplingParams
from quire.kv.digest import Mark
from quire.kv.manager import SequenceBlocks
from quire.scheduler.beams import BeamSearch, Hypothesis

NEVER = np.int64(1) << 62
NUM_STOP_IDS = 8

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Watcher(Protocol):
    """Observer of a sequence's end (`extension.Extension`)."""

    def leave(self, sequence: "Sequence", reason: str, now: float) -> None: ...

    def forget(self, sequence: "Sequence") -> None: ...


class Blocker(StrEnum):
    """Reason why a parked sequence waits. Extensions define their own StrEnum."""

    READY = "ready"  # the grammar is being compiled, or the model is being loaded
    PAUSED = "paused"  # a client paused the request


class State(Enum):
    """State of a sequence. The methods of `Lifecycle` make the transitions."""

    NEW = "new"  # created, not queued yet
    WAITING = "waiting"  # in the queue, with no computed tokens
    PARKED = "parked"  # outside the queue, until it can be computed
    RUNNING = "running"  # holds a row
    SWAPPED = "swapped"  # in the queue, with its computed tokens in host memory
    ENDED = "ended"

    __hash__ = object.__hash__  # each state is one object; an Enum hashes its name in Python


class RowTable:
    """Numbers of all rows: one array per number, so that a decode step is array arithmetic.

    capacity: tokens that the allocated blocks hold. index_at: length at which the next full block
    enters the index. num_open: 1 while the prompt may still grow. min_known: length before which
    stop tokens are ignored. tried: draft tokens in flight, included in `computed` and `total`.
    is_held: the row waits for the result of these drafts. is_masked: a mask restricts the row's
    tokens. samples: the row samples once its prompt is computed. epoch: number of past owners of
    the row. stop_ids: [num_rows, NUM_STOP_IDS], padded with -1. tokens: [num_rows, max_model_len],
    valid up to `known`. The other arrays are [num_rows].
    """

    def __init__(self, num_rows: int, max_model_len: int) -> None:
        self.num_rows = num_rows
        self.computed = np.zeros(num_rows, np.int64)
        self.total = np.zeros(num_rows, np.int64)
        self.known = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.num_open = np.zeros(num_rows, np.int64)
        self.capacity = np.zeros(num_rows, np.int64)
        self.index_at = np.full(num_rows, NEVER)
        self.min_known = np.zeros(num_rows, np.int64)
        self.arrival = np.zeros(num_rows, np.int64)
        self.priority = np.zeros(num_rows, np.int64)
        self.tenant = np.zeros(num_rows, np.int64)
        self.verified = np.zeros(num_rows, np.int64)
        self.is_held = np.zeros(num_rows, bool)
        self.is_masked = np.zeros(num_rows, bool)
        self.samples = np.ones(num_rows, bool)
        self.epoch = np.zeros(num_rows, np.int64)
        self.num_candidates = np.full(num_rows, -1, np.int32)
        self.stop_ids = np.full((num_rows, NUM_STOP_IDS), -1, np.int32)
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.sequences = np.full(num_rows, None, object)


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of a request. row: -1 while the sequence has no row.

    group: all sequences of a request for several; None for a single one. index: number in the
    group.
    """

    request: Request
    arrival: int
    arrival_s: float
    limit: int
    blocks: SequenceBlocks
    root: bytes
    table: RowTable = field(repr=False)
    saved_tokens: Int32 = field(repr=False, default_factory=lambda: np.empty(0, np.int32))
    state: State = State.NEW
    row: int = -1
    num_pending_lost: int = 0  # plans in flight at its preemption whose tokens are still to arrive
    digests: list[bytes] = field(default_factory=list, repr=False)
    num_cached_tokens: int = -1  # prefix hit at the first admission; -1 before
    num_prompt_tokens: int = 0
    is_open: bool = False  # whether the prompt may still grow
    reads_cache: bool = True  # whether the request allows prefix hits
    blockers: frozenset[StrEnum] = frozenset()  # reasons to wait outside the queue
    due_at: int = 0  # value of `num_planned_tokens` at which its turn comes (two_level.py)
    is_renamed: bool = False  # whether its block names are unique to it (names.py)
    tenant: int = 0  # slot of its tenant's counters
    keep_s: float = 0.0  # seconds to retain the sequence after its end
    report: PrefixReport | None = None  # prefix report of the first admission
    num_fetched_blocks: int = 0  # blocks fetched from stores
    num_offered: int = 0  # leading blocks offered to stores (offers.py)
    found_tokens: int = 0  # length of the prefix hit, looked up at index change number `found_at`
    found_at: int = -1
    # Prefix hits of other sources (`HitSource`), by kind: change number of the source, hit tokens.
    found_elsewhere: dict[StrEnum, tuple[int, int]] = field(default_factory=dict, repr=False)
    prefix_digests: dict[int, bytes] = field(default_factory=dict, repr=False)  # by length
    partial_digests: dict[int, bytes] = field(default_factory=dict, repr=False)  # by their end
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # prompt positions with logprobs already returned
    finish_reason: str | None = None
    host_blocks: SequenceBlocks | None = None  # swapped-out blocks
    num_swapped_tokens: int = 0  # computed tokens in host_blocks
    group: "SequenceGroup | None" = field(default=None, repr=False)
    index: int = 0
    watchers: "tuple[Watcher, ...]" = ()  # watchers to notify of its end

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of its row: the request's, except in a beam search."""
        row_params = None if self.group is None else self.group.row_params
        return row_params or self.request.params

    @property
    def members(self) -> "list[Sequence]":
        """All sequences of its request, including ended ones."""
        return [self] if self.group is None else list(self.group.members)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Marks that identify its tokens in addition to their ids (kv/digest.py), in order."""
        return self.request.marks if self.request.media else ()

    @property
    def samples(self) -> bool:
        """Whether it samples once its prompt is computed. A request that only pins a prompt does
        not."""
        return self.request.pin_s is None

    @property
    def is_beam(self) -> bool:
        return self.group is not None and self.group.search is not None

    @property
    def has_long_stop_list(self) -> bool:
        """Whether its request has more stop ids than a row has columns."""
        return len(self.request.stop_token_ids) > NUM_STOP_IDS

    @property
    def has_something_to_compute(self) -> bool:
        """Whether it has tokens to compute. The last token of an open prompt is not computed
        yet."""
        has_slots = self.num_swapped_tokens if self.host_blocks is not None else 0
        return self.num_known_tokens - self.is_open > has_slots

    @property
    def num_readable_tokens(self) -> int:
        """Number of leading tokens that it may take from a cache. If the request scores its prompt,
        only tokens with known scores count."""
        if not self.reads_cache and self.num_preemptions == 0:
            return 0
        needs_no_scores = self.request.params.prompt_logprobs is None
        if needs_no_scores or self.num_prompt_logprobs >= self.num_prompt_tokens - 1:
            return self.num_known_tokens
        return self.num_prompt_logprobs

    @property
    def may_read_cache(self) -> bool:
        return self.num_readable_tokens > 0

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def swapped(self) -> SequenceBlocks:
        assert self.host_blocks is not None, "the sequence is not swapped out"
        return self.host_blocks

    @property
    def num_computed_tokens(self) -> int:
        return self.table.computed.item(self.row) if self.row >= 0 else 0

    @property
    def num_known_tokens(self) -> int:
        return self.table.known.item(self.row) if self.row >= 0 else len(self.saved_tokens)

    @property
    def known_tokens(self) -> Int32:
        """Prompt and known output, int32 [num_known]. A view of the row's tokens while it has a
        row."""
        if self.row >= 0:
            return self.table.tokens[self.row, : self.table.known[self.row]]
        return self.saved_tokens

    def tokens_between(self, first: int, last: int) -> Int32:
        """Return known tokens `first` to `last`, int32 [last - first]; a view while it has a
        row."""
        if self.row >= 0:
            return self.table.tokens[self.row, first:last]
        return self.saved_tokens[first:last]

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Number of computed tokens that survive a swap; drafts in flight do not. A beam loses the
        candidates in flight, so it must compute its last token again."""
        if self.is_beam:
            return min(self.num_computed_tokens, self.num_known_tokens - 1)
        return self.num_computed_tokens - self.num_drafts_in_flight

    @property
    def num_drafts_in_flight(self) -> int:
        """Number of draft tokens in flight: the sequence shrinks by up to this number."""
        return self.table.verified.item(self.row) if self.row >= 0 else 0

    def watch(self, watcher: Watcher) -> None:
        """Notify this watcher when the sequence ends."""
        if watcher not in self.watchers:
            self.watchers = (*self.watchers, watcher)

    def stops_at(self, token_id: int) -> bool:
        """Return whether this token, the last known one, is an effective stop token. Before
        `min_tokens` outputs, stop tokens are ignored."""
        is_stop = token_id in self.request.stop_token_ids
        return is_stop and self.num_output_tokens >= self.request.params.min_tokens

    def is_over(self, token_id: int) -> bool:
        """Return whether this token, the last known one, ends the sequence by stop token or
        length."""
        return self.stops_at(token_id) or self.num_known_tokens >= self.limit


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """Sequences of one request, which share its prompt (branching.py).

    num_members: size of the complete group. members: sequences so far, the leader first, then by
    index. reserved_rows: rows for the missing members.

    Of a beam search: search is its state, and order lists the beams, best first. candidates maps an
    index to the candidates of the current step. row_params are the sampling parameters of the rows.
    """

    num_members: int
    members: list[Sequence] = field(default_factory=list)
    reserved_rows: list[int] = field(default_factory=list)
    search: BeamSearch | None = None
    order: list[Sequence] = field(default_factory=list)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    row_params: SamplingParams | None = None

    @property
    def is_forked(self) -> bool:
        return len(self.members) == self.num_members

    @property
    def unfinished(self) -> list[Sequence]:
        return [member for member in self.members if member.state is not State.ENDED]

    @property
    def running(self) -> list[Sequence]:
        return [member for member in self.members if member.row >= 0]

    @property
    def results(self) -> list[Hypothesis]:
        """Results of a beam search; empty until it is over."""
        if self.search is None or not self.search.is_over:
            return []
        return self.search.hypotheses(self.members[0].request.params.n)
