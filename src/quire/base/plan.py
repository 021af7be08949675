"""A step as data: `Plan` goes to the executor, `StepResult` comes back. Both are frozen.

Shape legend: S scheduled rows, N sampling rows, W block-table writes, C candidates, k the most
draft tokens of a row. A plan is applied in this order: released, started, forked, truncated, host
tokens, block writes, moves (swap out, load, copy), encoder, forward pass, sampling, counters. Input
ids, positions, lengths and slots are derived on the device from the rows. Arrays are never written
after they were handed over.

A model in stages samples on the last one alone. So a plan for several says of each row all that the
others may not know: `computed_bound` is exact, and `last_ids` is the last known token that the row
computes; after it there are only draft tokens. Those before it came with earlier plans.

Between two steps a draft model gets a `DraftOrder`, and returns a `DraftAnswer`.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from quire.base.requests.media_items import EncoderInput, EncoderRead, MediaItem
from quire.base.requests.sampling_params import SamplingParams

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def _no_ints() -> Int32:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence takes a row: its known tokens, how many of them are computed, how it samples.

    num_prompt_tokens: tokens of the request's prompt (those after it count as output).
    seed: 64 bits; with the sample index and the position it determines all randomness.
    media: the items of its prompt, without pixels, in the order of the prompt. Recordings omit it
    where there are none.
    """

    row: int
    token_ids: Int32
    num_computed_tokens: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    media: tuple[MediaItem, ...] = field(default=(), metadata={"is_omitted": True})


@dataclass(frozen=True, slots=True)
class RowFork:
    """A child takes a row as a copy of its parent's: tokens, counters, block tables, sampling.

    A child that is not among the plan's rows samples from its parent's logits (`Plan.sources`) and
    has computed what its parent has when the step is over.
    """

    parent: int
    child: int
    sample_index: int


@dataclass(frozen=True, slots=True)
class HostTokens:
    """Tokens that the host writes into a row that has already started: a piece of its prompt, or
    the token that a beam search chose."""

    row: int
    position: int
    token_ids: Int32
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class RowDraft:
    """Guesses at what follows a row's known tokens, [k]. The row computes them with its last known
    token, and samples at each; what it samples counts up to the first that is not the guess. Those
    that the device makes itself (`Plan.is_guessing`) follow its last token, whether the host knows
    it or not."""

    row: int
    token_ids: Int32


@dataclass(frozen=True, slots=True)
class BlockWrites:
    """Block-table entries to set, as parallel arrays: table[group][row, index] = block_id."""

    group: Int32 = field(default_factory=_no_ints)  # [W]
    row: Int32 = field(default_factory=_no_ints)  # [W]
    index: Int32 = field(default_factory=_no_ints)  # [W]
    block_id: Int32 = field(default_factory=_no_ints)  # [W]


class MoveKind(StrEnum):
    SWAP_OUT = "swap_out"  # from the device to host memory
    LOAD = "load"  # from host memory to the device
    COPY = "copy"  # within the device's memory


@dataclass(frozen=True, slots=True)
class Move:
    """Copies of whole blocks within a group. kind: may be given by its word."""

    kind: MoveKind
    group: int
    source: Int32
    destination: Int32

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", MoveKind(self.kind))


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `rows` are row numbers; the sampling rows are `sample_rows`: some of them, and rows
    that are forked from some of them."""

    step_id: int
    rows: Int32 = field(default_factory=_no_ints)  # [S]
    num_tokens: Int32 = field(default_factory=_no_ints)  # [S]
    computed_bound: Int32 = field(default_factory=_no_ints)  # [S] upper bound before the step
    sample_rows: Int32 = field(default_factory=_no_ints)  # [N]
    num_candidates: Int32 = field(default_factory=_no_ints)  # [N] -1 none, 0.. logprobs wanted
    sources: Int32 = field(default_factory=_no_ints)  # [N] whose logits; empty: each its own
    masked_rows: Int32 = field(default_factory=_no_ints)  # [M] those of sample_rows with a grammar
    started: tuple[RowStart, ...] = ()
    forked: tuple[RowFork, ...] = ()
    truncated: tuple[tuple[int, int], ...] = ()  # (row, tokens that remain)
    released: Int32 = field(default_factory=_no_ints)
    host_tokens: tuple[HostTokens, ...] = ()
    block_writes: BlockWrites = field(default_factory=BlockWrites)
    moves: tuple[Move, ...] = ()
    drafts: tuple[RowDraft, ...] = ()  # of some of sample_rows; num_tokens counts them
    is_guessing: bool = False  # the device makes these guesses, in the place of their ids
    last_ids: Int32 = field(default_factory=_no_ints)  # [S] empty: one stage; see below
    encoder_inputs: tuple[EncoderInput, ...] = ()
    encoder_reads: tuple[EncoderRead, ...] = ()

    @property
    def num_drafts(self) -> Int32:
        """[S] how many of a row's tokens, at the end, are guesses."""
        if not self.drafts:
            return np.zeros(len(self.rows), np.int32)
        counts = dict.fromkeys(self.rows.tolist(), 0)
        counts |= {draft.row: len(draft.token_ids) for draft in self.drafts}
        return np.fromiter(counts.values(), np.int32, len(counts))

    @property
    def last_positions(self) -> Int32:
        """[S] where last_ids stand in their rows."""
        found: Int32 = self.computed_bound + self.num_tokens - self.num_drafts - 1
        return found

    @property
    def without_drafts(self) -> "Plan":
        """Return the plan as it would be if nothing had been guessed."""
        if not self.drafts:
            return self
        num_tokens = self.num_tokens - self.num_drafts
        return replace(self, num_tokens=num_tokens, drafts=(), is_guessing=False)

    @property
    def new_forks(self) -> tuple[RowFork, ...]:
        """Forks whose child is not scheduled but samples: it begins where its parent's step ends.
        Other forks copy a row as it was before the step."""
        if not self.forked:
            return ()
        new = set(self.sample_rows.tolist()) - set(self.rows.tolist())
        return tuple(fork for fork in self.forked if fork.child in new)

    @property
    def idle_rows(self) -> list[int]:
        """Rows that start with it and compute nothing yet."""
        if not self.started:
            return []
        busy = set(self.rows.tolist())
        return [start.row for start in self.started if start.row not in busy]

    @property
    def sample_sources(self) -> Int32:
        """[N] the scheduled rows whose logits the sampling rows use."""
        return self.sources if len(self.sources) else self.sample_rows

    @property
    def sample_places(self) -> npt.NDArray[np.intp]:
        """[N] which of the scheduled rows they are."""
        order = np.argsort(self.rows, kind="stable")
        return order[np.searchsorted(self.rows, self.sample_sources, sorter=order)]

    @property
    def num_scheduled_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(frozen=True, slots=True)
class Candidates:
    """Log-probabilities of one position: the chosen token first, then the most probable ones.

    token_ids and logprobs: [1 + C]; rank: of the chosen token, 1 is the most probable.
    """

    token_ids: Int32
    logprobs: Float32
    rank: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    token_ids: [N, 1 + drafts], of which num_accepted [N] are valid from the left: one, and one more
    for each guess that was right.
    candidates: sampling row -> Candidates of its first token, for those that asked for logprobs;
    more_candidates: of its others.
    prompt_candidates: row -> Candidates of the prompt positions that this step computed, in order;
    the first is for the position after the first computed one.
    row_errors: row -> what went wrong with it; unservable_rows: those of them whose request leaves
    no token to choose, which is no fault of the step. error: the step failed as a whole, nothing of
    it counts. lost_swaps: what the plan was to copy to host memory is not there.
    pooled: sampling row -> the numbers that its prompt came to, of a model that pools; its token
    says nothing then.
    """

    step_id: int
    token_ids: Int32
    num_accepted: Int32
    candidates: dict[int, Candidates] = field(default_factory=dict)
    prompt_candidates: dict[int, list[Candidates]] = field(default_factory=dict)
    row_errors: dict[int, str] = field(default_factory=dict)
    duration_s: float = 0.0
    error: str | None = None
    unservable_rows: tuple[int, ...] = ()
    lost_swaps: bool = False
    more_candidates: dict[int, list[Candidates]] = field(default_factory=dict)
    pooled: dict[int, Float64] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """The drafter computes tokens of some rows of the last step, and drafts for some of them.

    rows: [S]. first, num_tokens: [S] the position of the first token and how many there are, one
    at least. num_known: [S] tokens that the row has; guesses are what follows them. num_guesses:
    [S] where it is not 0, the tokens are all up to the last that the drafter can compute. capacity:
    [S] tokens that the row's own blocks hold. read_from: [S] which token of the last step the first
    one was.
    """

    rows: Int32
    first: Int32
    num_tokens: Int32
    num_known: Int32
    num_guesses: Int32
    capacity: Int32
    read_from: Int32


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """token_ids: [S, k] draft tokens, -1 where there is none."""

    token_ids: Int32
    duration_s: float
