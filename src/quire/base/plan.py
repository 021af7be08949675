"""A step as data: `Plan` goes to the executor, `StepResult` comes back. Both are frozen.

Shapes: S scheduled rows, N sampling rows, M rows with a mask, W block-table writes, C candidates, k
maximum draft tokens per row. Arrays are never changed after they are handed over.

Order of execution: released, started, forked, truncated, host tokens, block writes, moves (swap
out, load, copy), encoder, forward pass, sampling, counters. The device derives
input ids, positions, lengths and slots from the rows.

In a pipeline only the last stage samples. So a plan for several stages contains the data that the
other stages need. `computed_bound` is exact, and `last_ids` holds the last known token that each
row computes. Only draft tokens follow this token; earlier plans brought the tokens before it.

Between two steps a draft model gets a `DraftOrder` and returns a `DraftAnswer`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.requests.media_items import EncoderInput, EncoderRead, MediaItem
from quire.base.requests.sampling_params import SamplingParams

Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


NO_INTS: Int32 = np.empty(0, np.int32)


class Record(msgspec.Struct):
    """Base of classes with typed fields. An instance is created several times faster than a
    dataclass instance."""


class FrozenRecord(msgspec.Struct, frozen=True):
    """Base of records whose fields never change."""

    def replace(self, **fields: Any) -> Self:
        """Return a copy with other values in some fields."""
        return msgspec.structs.replace(self, **fields)


@dataclass(slots=True)
class RowStart:
    """A sequence takes a row. No code changes it, but freezing would triple its cost."""

    row: int
    token_ids: Int32  # known tokens
    num_computed_tokens: int
    num_prompt_tokens: int  # known tokens that belong to the prompt; later ones are output
    params: SamplingParams
    seed: int  # 64 bits; determines all randomness, with sample_index and position
    sample_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter_id: str = field(default="", metadata={"is_omitted": True})
    # items of the prompt in order, without pixels; recordings omit an empty tuple
    media: tuple[MediaItem, ...] = field(default=(), metadata={"is_omitted": True})


@dataclass(frozen=True, slots=True)
class RowFork:
    """A child takes a row as a copy of its parent's: tokens, counters, block tables, sampling.

    A child that is not one of the plan's rows samples from its parent's logits (`Plan.sources`).
    After the step it has computed as many tokens as its parent.
    """

    parent: int
    child: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class HostTokens:
    """Tokens that the host writes into a started row: a piece of its prompt, or the token that a
    beam search chose."""

    row: int
    position: int
    token_ids: Int32
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class RowDraft:
    """Draft tokens after a row's known tokens, [k].

    The row computes them together with its last known token and samples at each. Sampled tokens
    count up to the first that differs from its draft token. Draft tokens of the device itself
    (`Plan.is_guessing`) follow the row's last token, even if the host does not know that token."""

    row: int
    token_ids: Int32


class BlockWrites(FrozenRecord, frozen=True):
    """Block-table entries to set, as parallel arrays: table[group][row, index] = block_id."""

    group: Int32 = NO_INTS  # [W]
    row: Int32 = NO_INTS  # [W]
    index: Int32 = NO_INTS  # [W]
    block_id: Int32 = NO_INTS  # [W]


class MoveKind(StrEnum):
    SWAP_OUT = "swap_out"  # from the device to host memory
    LOAD = "load"  # from host memory to the device
    COPY = "copy"  # within the device's memory


@dataclass(frozen=True, slots=True)
class Move:
    """Copies of whole blocks within a cache group. `kind` may be given as a string."""

    kind: MoveKind
    group: int
    source: Int32
    destination: Int32

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", MoveKind(self.kind))


class Plan(FrozenRecord, frozen=True):
    """One step. `sample_rows` are scheduled rows, or forks of scheduled rows."""

    step_id: int
    rows: Int32 = NO_INTS  # [S]
    num_tokens: Int32 = NO_INTS  # [S]
    computed_bound: Int32 = NO_INTS  # [S] bound on computed tokens before
    sample_rows: Int32 = NO_INTS  # [N]
    num_candidates: Int32 = NO_INTS  # [N] -1 none, else number of logprobs
    sources: Int32 = NO_INTS  # [N] rows of the logits; empty: sample_rows
    masked_rows: Int32 = NO_INTS  # [M] sampling rows with a grammar
    started: tuple[RowStart, ...] = ()
    forked: tuple[RowFork, ...] = ()
    truncated: tuple[tuple[int, int], ...] = ()  # (row, tokens that remain)
    released: Int32 = NO_INTS
    host_tokens: tuple[HostTokens, ...] = ()
    block_writes: BlockWrites = BlockWrites()
    moves: tuple[Move, ...] = ()
    drafts: tuple[RowDraft, ...] = ()  # for some of sample_rows; included in num_tokens
    is_guessing: bool = False  # whether the device proposes the draft tokens; their ids are unset
    last_ids: Int32 = NO_INTS  # [S] see above; empty with one stage
    encoder_inputs: tuple[EncoderInput, ...] = ()
    encoder_reads: tuple[EncoderRead, ...] = ()

    @property
    def num_drafts(self) -> Int32:
        """[S] draft tokens among each row's num_tokens; they come last."""
        if not self.drafts:
            return np.zeros(len(self.rows), np.int32)
        counts = dict.fromkeys(self.rows.tolist(), 0)
        counts |= {draft.row: len(draft.token_ids) for draft in self.drafts}
        return np.fromiter(counts.values(), np.int32, len(counts))

    @property
    def last_positions(self) -> Int32:
        """[S] positions of last_ids in their rows."""
        found: Int32 = self.computed_bound + self.num_tokens - self.num_drafts - 1
        return found

    @property
    def without_drafts(self) -> "Plan":
        """Return the plan without its draft tokens."""
        if not self.drafts:
            return self
        num_tokens = self.num_tokens - self.num_drafts
        return self.replace(num_tokens=num_tokens, drafts=(), is_guessing=False)

    @property
    def new_forks(self) -> tuple[RowFork, ...]:
        """Forks whose child samples without being scheduled: it starts after its parent's step.
        Other forks copy the row's state before the step."""
        if not self.forked:
            return ()
        new = set(self.sample_rows.tolist()) - set(self.rows.tolist())
        return tuple(fork for fork in self.forked if fork.child in new)

    @property
    def idle_rows(self) -> list[int]:
        """Rows that start with this plan and compute nothing in it."""
        if not self.started:
            return []
        started = [start.row for start in self.started]
        if self.rows[-len(started) :].tolist() == started:  # as usual, all of them compute tokens
            return []
        return [row for row in started if row not in self.rows]

    @property
    def sample_sources(self) -> Int32:
        """[N] the scheduled rows whose logits the sampling rows use."""
        return self.sources if len(self.sources) else self.sample_rows

    @property
    def sample_indices(self) -> npt.NDArray[np.intp]:
        """[N] indices of sample_sources in `rows`."""
        sources = self.sample_sources
        if sources is self.rows or np.array_equal(sources, self.rows):  # the usual case
            return np.arange(len(sources))
        order = np.argsort(self.rows, kind="stable")
        return order[np.searchsorted(self.rows, sources, sorter=order)]

    @property
    def num_scheduled_tokens(self) -> int:
        return int(np.add.reduce(self.num_tokens))  # half the time of `sum`, which wraps it


@dataclass(frozen=True, slots=True)
class Candidates:
    """Log-probabilities of one position: the chosen token first, then the most probable ones."""

    token_ids: Int32  # [1 + C]
    logprobs: Float32  # [1 + C]
    rank: int  # rank of the chosen token; 1 for the most probable one


UNKNOWN = -1  # values of tokens that another request has computed


class TokenValues(FrozenRecord, frozen=True):
    """Values of consecutive tokens of a sequence, such as the experts that they used."""

    first: int  # position of the first token
    shape: tuple[int, ...]  # of one token's values
    values: Int16  # of all tokens, flat


class StepResult(FrozenRecord, frozen=True):
    """The result of a step. Dictionaries are by row; sampling rows may be forks."""

    step_id: int
    token_ids: Int32  # [N, 1 + drafts]
    num_accepted: Int32  # [N] valid token_ids from the left: one, plus accepted draft tokens
    candidates: dict[int, Candidates] = {}  # of first tokens, if requested
    # Candidates of the prompt positions that the step computed, in order; the first entry belongs
    # to the position after the first computed one
    prompt_candidates: dict[int, list[Candidates]] = {}
    row_errors: dict[int, str] = {}
    duration_s: float = 0.0
    error: str | None = None  # failure of the whole step, which makes the result void
    unservable_rows: tuple[int, ...] = ()  # rows whose request allows no token: not a step's fault
    lost_swaps: bool = False  # whether the plan's copies to host memory failed
    more_candidates: dict[int, list[Candidates]] = {}  # of later tokens
    pooled: dict[int, Float64] = {}  # pooled outputs; tokens mean nothing
    token_values: dict[int, TokenValues] = {}  # of the tokens that a row computed


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Order to the drafter: compute tokens of the last step's rows, and draft for some rows.

    If a row's num_draft_tokens is not 0, its tokens reach the last token that the drafter can
    compute.
    """

    rows: Int32  # [S]
    first: Int32  # [S] position of the first token to compute
    num_tokens: Int32  # [S] number of tokens to compute, at least 1
    num_known: Int32  # [S] tokens of the row; draft tokens follow them
    num_draft_tokens: Int32  # [S] draft tokens to propose
    capacity: Int32  # [S] tokens for which the row's own blocks have room
    read_from: Int32  # [S] index of the first token among all tokens of the last step


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """The drafter's answer."""

    token_ids: Int32  # [S, k] draft tokens; -1 for none
    duration_s: float
