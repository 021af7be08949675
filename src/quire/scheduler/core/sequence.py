"""Sequence state: numbers as arrays indexed by row, and `Sequence`, a view of one row.

A sequence's progress is `computed` chasing `total` (T 4.4.2). `total` counts the prompt, the known
output and the pending tokens, which plans in flight will sample; `known` leaves those out. A
sequence without a row keeps its known tokens itself and has computed nothing.

    token index   0 ........ prompt ........ known ...... total ......... limit
                  |-- computed -->|          |- pending -|    not sampled yet |

Columns are assigned in `rows.py` alone, `Sequence.state` in `lifecycle.py` alone.
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
    """Hears when a sequence ends (`extension.Extension`)."""

    def leave(self, sequence: "Sequence", reason: str, now: float) -> None: ...

    def forget(self, sequence: "Sequence") -> None: ...


class Blocker(StrEnum):
    """What a parked sequence waits for. Extensions have a StrEnum of their own."""

    READY = "ready"  # its grammar is not compiled, or its model not loaded, yet
    PAUSED = "paused"  # a client paused its request


class State(Enum):
    """The state of a sequence; the methods of `Lifecycle` are the transitions."""

    NEW = "new"  # made, and not entered yet
    WAITING = "waiting"  # in the queue, with nothing computed
    PARKED = "parked"  # outside the queue, until it can be computed
    RUNNING = "running"  # holds a row
    SWAPPED = "swapped"  # in the queue, with what it has computed in host memory
    ENDED = "ended"


class RowTable:
    """The numbers of all rows. One array per number; steady decode is arithmetic on them.

    capacity: tokens that the allocated blocks hold. index_at: length at which the next full block
    enters the index. num_open: 1 while more of the prompt is to come. min_known: length before
    which no stop token counts. tried: draft tokens in flight, which `computed` and `total` count.
    is_held: the row waits for their result. is_masked: a mask restricts its tokens. samples: its
    prompt gets an answer. epoch: number of sequences that the row had. stop_ids: [rows,
    NUM_STOP_IDS], padded with -1. tokens: [rows, max_model_len], valid up to `known`.
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
        self.tried = np.zeros(num_rows, np.int64)
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
    """One sequence of a request. row is -1 while it holds none.

    group: the sequences of a request for several, None otherwise. index: its number among them.
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
    num_pending_lost: int = 0  # plans in flight when it was preempted that will bring it tokens
    digests: list[bytes] = field(default_factory=list, repr=False)
    num_cached_tokens: int = -1  # prefix hit at first admission; -1 before
    num_prompt_tokens: int = 0
    is_open: bool = False  # more of the prompt is to come
    reads_cache: bool = True  # its request lets it begin with cached blocks
    blockers: frozenset[StrEnum] = frozenset()  # what it waits for outside the queue
    due_at: int = 0  # planned tokens at which its turn has come (two_level.py)
    is_renamed: bool = False  # nobody else has the names of its blocks (names.py)
    tenant: int = 0  # its slot among the tenants' counters
    keep_s: float = 0.0  # how long it is held when it has ended
    report: PrefixReport | None = None  # of its first admission
    num_fetched_blocks: int = 0  # that stores brought for it
    num_offered: int = 0  # leading blocks that stores were offered (offers.py)
    found_tokens: int = 0  # prefix hit when the index had changed found_at times
    found_at: int = -1
    # Of another source (`HitSource`), by its kind: when that had changed so often, so many tokens.
    found_elsewhere: dict[StrEnum, tuple[int, int]] = field(default_factory=dict, repr=False)
    prefix_digests: dict[int, bytes] = field(default_factory=dict, repr=False)  # by length
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # prompt positions whose logprobs were handed out
    finish_reason: str | None = None
    host_blocks: SequenceBlocks | None = None  # what was swapped out
    num_swapped_tokens: int = 0  # how many were computed then
    group: "SequenceGroup | None" = field(default=None, repr=False)
    index: int = 0
    watchers: "tuple[Watcher, ...]" = ()  # who is told of its end

    @property
    def params(self) -> SamplingParams:
        """How its row samples: as the request says, except in a beam search."""
        row_params = None if self.group is None else self.group.row_params
        return row_params or self.request.params

    @property
    def members(self) -> "list[Sequence]":
        """The sequences of its request, also those that have ended."""
        return [self] if self.group is None else list(self.group.members)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What identifies its tokens besides their ids (kv/digest.py), in order."""
        return self.request.marks if self.request.media else ()

    @property
    def samples(self) -> bool:
        """Whether it samples once its prompt is computed."""
        return self.request.pin_s is None

    @property
    def is_beam(self) -> bool:
        return self.group is not None and self.group.search is not None

    @property
    def has_long_stop_list(self) -> bool:
        """Whether it has more stop ids than its row holds."""
        return len(self.request.stop_token_ids) > NUM_STOP_IDS

    @property
    def has_something_to_compute(self) -> bool:
        """Whether it has tokens to compute; an open prompt keeps its last one back."""
        has_slots = self.num_swapped_tokens if self.host_blocks is not None else 0
        return self.num_known_tokens - self.is_open > has_slots

    @property
    def num_readable_tokens(self) -> int:
        """The number of its first tokens that it may take from a cache. If the tokens of its prompt
        are scored, only those whose scores are known."""
        if not self.reads_cache and self.num_preemptions == 0:
            return 0
        is_scored = self.num_prompt_logprobs >= self.num_prompt_tokens - 1
        if self.request.params.prompt_logprobs is None or is_scored:
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
        return int(self.table.computed[self.row]) if self.row >= 0 else 0

    @property
    def num_known_tokens(self) -> int:
        return int(self.table.known[self.row]) if self.row >= 0 else len(self.saved_tokens)

    @property
    def known_tokens(self) -> Int32:
        """Prompt and known output; a view while it holds a row."""
        if self.row >= 0:
            return self.table.tokens[self.row, : self.table.known[self.row]]
        return self.saved_tokens

    def tokens_between(self, first: int, last: int) -> Int32:
        """Return some of the known tokens; a view while it holds a row."""
        if self.row >= 0:
            return self.table.tokens[self.row, first:last]
        return self.saved_tokens[first:last]

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens

    @property
    def num_kept_tokens(self) -> int:
        """Computed tokens that it keeps when it is swapped out, without drafts in flight. A beam
        loses candidates in flight, so it must compute its last token again."""
        if self.is_beam:
            return min(self.num_computed_tokens, self.num_known_tokens - 1)
        return self.num_computed_tokens - self.num_tried_tokens

    @property
    def num_tried_tokens(self) -> int:
        """Draft tokens in flight: how much shorter it may turn out to be."""
        return int(self.table.tried[self.row]) if self.row >= 0 else 0

    def watch(self, watcher: Watcher) -> None:
        """Let this watcher hear of the sequence's end."""
        if watcher not in self.watchers:
            self.watchers = (*self.watchers, watcher)

    def stops_at(self, token_id: int) -> bool:
        """Return whether this token, the last known one, is a stop token that counts."""
        enough = self.num_output_tokens >= self.request.params.min_tokens
        return enough and token_id in self.request.stop_token_ids

    def is_over(self, token_id: int) -> bool:
        """Return whether this token, the last known one, ends the sequence."""
        return self.stops_at(token_id) or self.num_known_tokens >= self.limit


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """The sequences of one request, which share its prompt (branching.py).

    num_members: members of the complete group. members: the leader first, then by index.
    reserved_rows: for members to come. Of a beam search: search is its state, order the beams, best
    first, candidates what the step gave them so far, by index, row_params how its rows sample.
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
        """The results of a beam search; none until it is over."""
        if self.search is None or not self.search.is_over:
            return []
        return self.search.hypotheses(self.members[0].request.params.n)
