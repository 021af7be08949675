"""Operations of a step on rows and logits: the interface of kernels, torch and core. No torch.

A step is

    take an update  ->  gather  ->  forward pass  ->  edit  ->  choose  ->  advance

and the step's masks, if any, are read before `edit`. An operation may run long after the host
submitted it, so it must not read host memory that may change in the meantime.

Shape legend: S scheduled rows, N sampling rows, T tokens of the step, V vocabulary, F forks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart
from quire.ops.rows.row_arrays import last_writes
from quire.runner.device import Arrival, Graph

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

    from quire.ops.rows.step_inputs import SampleInputs, StepInputs
    from quire.ops.sampling.logit_edits import EditTable

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_LOGPROBS = -2  # -1 requests the whole vocabulary
ALL_LOGPROBS = -1
# Numbers of candidates for which steps are recorded; others are rounded up to the next one.
RECORDED_CANDIDATES = (0, 5, 20)
NUM_RESULTS = 8  # maximum number of steps whose tokens are in flight to the host


@dataclass
class RowUpdates:
    """Changes of a plan to rows, in its order. deltas: [K, 4] (`quire.ops.rows.row_arrays`). runs:
    (row, first position, tokens)."""

    deltas: list[Int32] = field(default_factory=list)
    runs: list[tuple[int, int, Int32]] = field(default_factory=list)

    def all_deltas(self) -> Int32:
        """Return all deltas in their order, [K, 4] int32."""
        if len(self.deltas) == 1:
            return self.deltas[0]
        return np.concatenate(self.deltas) if self.deltas else np.empty((0, 4), np.int32)

    def merged_deltas(self) -> Int32:
        """Return the deltas [K, 4] int32 of which no two write to one entry."""
        return merged(self.all_deltas())


def merged(deltas: Int32) -> Int32:
    """Return deltas [K, 4]; of several deltas to one entry, only the last one."""
    if len(deltas) <= 1:
        return deltas
    wide = deltas.astype(np.int64)
    positions = ((wide[:, 0] + 8) << 56) + (wide[:, 1] << 31) + wide[:, 2]
    last: Int32 = deltas[last_writes(positions)]
    return last


@dataclass
class SamplingFlags:
    """Requested sampling features, as arrays indexed by row. An entry is valid between `start` and
    `release`.

    has_edits: lists of tokens or biases. has_extras: features without a kernel, or named tokens.
    is_beam: row of a beam search. top_k: 0 is off. num_logprobs: number of candidates, NO_LOGPROBS
    or ALL_LOGPROBS.
    """

    bits_6R: Flags  # in the order of the names below
    numbers_2R: Int64

    def __post_init__(self) -> None:
        self.is_greedy, self.has_filter, self.has_penalties, *others = self.bits_6R
        self.has_edits, self.has_extras, self.is_beam = others
        self.top_k, self.num_logprobs = self.numbers_2R

    @classmethod
    def of_rows(cls, max_num_rows: int) -> "SamplingFlags":
        """Return flags of rows without any feature."""
        flags = cls(np.zeros((6, max_num_rows), bool), np.zeros((2, max_num_rows), np.int64))
        flags.is_greedy[:] = True
        flags.num_logprobs[:] = NO_LOGPROBS
        return flags

    def start(self, start: RowStart) -> None:
        """Set the flags of a row when a sequence starts in it."""
        row, params = start.row, start.params
        self.is_greedy[row] = params.is_greedy
        self.has_filter[row] = params.has_filters and not params.is_greedy
        self.has_penalties[row] = params.has_penalties
        self.is_beam[row] = params.use_beam_search
        self.top_k[row] = max(params.top_k, 0)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.has_edits[row] = requests_edits(start)
        self.has_extras[row] = requests_extras(start)

    def release(self, rows: Int32) -> None:
        """Clear the flags of released rows."""
        self.has_edits[rows] = self.has_extras[rows] = False
        self.num_logprobs[rows] = NO_LOGPROBS

    def copy(self, parent: int, child: int) -> None:
        """Copy a parent's flags to its forked child."""
        self.bits_6R[:, child] = self.bits_6R[:, parent]
        self.numbers_2R[:, child] = self.numbers_2R[:, parent]

    def at(self, rows: Int32) -> "SamplingFlags":
        """Return a copy of the entries of these rows."""
        return SamplingFlags(self.bits_6R.take(rows, axis=1), self.numbers_2R.take(rows, axis=1))


def requests_edits(start: RowStart) -> bool:
    """Return whether the row's logits are masked or biased."""
    params = start.params
    has_lists = bool(params.allowed_token_ids or start.bad_words_token_ids or params.logit_bias)
    return has_lists or has_min_tokens(start)


def has_min_tokens(start: RowStart) -> bool:
    """Return whether stop tokens are forbidden at the beginning of the row's output."""
    return start.params.min_tokens > 0 and len(start.stop_token_ids) > 0


def requests_extras(start: RowStart) -> bool:
    """Return whether the row requests features without a kernel, or names tokens."""
    params = start.params
    has_own = bool(params.logits_processors or params.logprob_token_ids)
    return params.has_dry or params.has_xtc or has_own


def requests_features(start: RowStart) -> bool:
    """Return whether the row requests more than the columns of its state express."""
    params = start.params
    has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    return has_logprobs or requests_edits(start) or requests_extras(start)


@dataclass(frozen=True)
class StepShape:
    """Size of a step on the host. query_lens, context_lens: new tokens and context of each row
    slot; upper bounds of the device's values. num_samples: rows that sample. is_uncut, is_separate:
    see AttentionStep."""

    query_lens: Int32
    context_lens: Int32
    num_samples: int
    is_uncut: bool = False
    is_separate: bool = False

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@dataclass(frozen=True)
class SamplingRequests:
    """Requested sampling features of a step's sampling rows. spans: spans of their edits, by
    position among them. masked: positions of rows with a mask."""

    rows: Int32
    flags: SamplingFlags
    spans: dict[int, Int32] = field(default_factory=dict)
    masked: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))

    @property
    def masked_beams(self) -> Flags:
        """Return which rows choose beam search candidates among allowed tokens, bool [N]."""
        found = np.zeros(len(self.rows), bool)
        found[self.masked] = self.flags.is_beam[self.masked]
        return found


@dataclass(frozen=True)
class Sampling:
    """Sampling rows with the host's knowledge of them. lengths: numbers of tokens, upper bounds of
    the device's values. prompt_lens: how many of these tokens are prompt."""

    requested: SamplingRequests
    lengths: npt.NDArray[np.integer]
    prompt_lens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepLists:
    """Rows of a step. rows, num_tokens: scheduled rows and their numbers of tokens. sampling:
    sampling rows. sample_indices: for each of them, the index of the scheduled row whose logits it
    uses. result_slot: slot for the step's tokens."""

    rows: Int32
    num_tokens: Int32
    sampling: Sampling
    sample_indices: npt.NDArray[np.intp]
    result_slot: int

    @property
    def sample_rows(self) -> Int32:
        return self.sampling.requested.rows


@dataclass(frozen=True)
class Needs:
    """Needs of a step in addition to the choice of tokens; part of a graph's key. edits:
    generation of the edit table; None without edits. num_candidates: of each row, or NO_LOGPROBS.
    has_beams: masks also apply to beam search candidates. has_extras: see SamplingFlags. is_uncut:
    see AttentionStep; only of recorded steps, whose lengths vary. is_unused: no row uses a feature
    of the forward pass, so the step may skip its work."""

    has_filters: bool = False
    has_penalties: bool = False
    edits: int | None = None
    num_candidates: int = NO_LOGPROBS
    has_masks: bool = False
    has_beams: bool = False
    has_extras: bool = False
    is_uncut: bool = False
    is_unused: bool = False

    @property
    def can_be_recorded(self) -> bool:
        is_rare = self.has_beams or self.has_extras
        return self.num_candidates <= RECORDED_CANDIDATES[-1] and not is_rare

    @property
    def all_logits(self) -> bool:
        """Return whether sampling does more than a choice among all tokens by logits and noise."""
        is_changed = self.has_penalties or self.edits is not None or self.has_masks
        reports_logprobs = self.num_candidates != NO_LOGPROBS
        return (
            self.has_filters or is_changed or reports_logprobs or self.has_beams or self.has_extras
        )

    @property
    def makes_copy(self) -> bool:
        """Return whether `edit` changes a copy of the logits."""
        return self.edits is not None or self.has_penalties


@functools.lru_cache(64)
def unused(needs: Needs) -> Needs:
    """Return the needs of a step whose rows use no feature of the forward pass; the same object for
    equal needs."""
    return replace(needs, is_unused=True)


@dataclass(frozen=True)
class Update:
    """Prepared changes to the rows. take: apply them, before any other work of the step. hold: keep
    their memory until the given arrival, when they have been read. replay: apply them and replay a
    graph that is all of the step, now and in one call; the step's tokens arrive. None: there is no
    such call."""

    take: Callable[[], None]
    hold: Callable[[Arrival], None]
    replay: Callable[[Graph], Arrival] | None = None


NO_UPDATE = Update(lambda: None, lambda arrival: None)


@dataclass(frozen=True)
class Gathered:
    """Gathered inputs of a step. inputs: of the forward pass, without padded rows. contexts: number
    of tokens of each row slot after this step. rows: row of each scheduled row slot; any number in
    slots without tokens."""

    inputs: "StepInputs"
    samples: "SampleInputs"
    contexts: "torch.Tensor"
    rows: "torch.Tensor"

    def valid_rows(self, other: int) -> "torch.Tensor":
        """Return the row of each scheduled row slot, int64 [S]; `other` in slots without tokens."""
        has_tokens_S = self.inputs.query_starts_S1.diff() > 0
        return self.rows.where(has_tokens_S, other).long()


class StepOps(Protocol):
    """Operations of a step on rows and logits. can_be_recorded: whether a graph can hold their
    launches. results_QR: tokens of the last NUM_RESULTS steps, int32, -1 where no token could be
    chosen."""

    can_be_recorded: bool
    results_QR: "torch.Tensor"

    def fork(self, pairs_F2: Int32) -> None:
        """Copy rows, as pairs (parent, child), [F, 2], after all earlier work. No child may be
        another fork's parent or child."""
        ...

    def prepare(self, updates: RowUpdates, lists: StepLists | None) -> Update:
        """Prepare changes. lists: of the step that comes next, if any."""
        ...

    def prepare_masks(self, positions: Int32, words: Int32) -> Update:
        """Prepare token masks for `edit`. positions: [M], among the step's sampling rows. words:
        [M,
        W] (`quire.ops.sampling.logit_edits`)."""
        ...

    def gather(self, shape: StepShape) -> Gathered:
        """Gather the inputs of the step whose lists were applied last."""
        ...

    def serve(self, sampling: Sampling) -> None:
        """Make `edit` and `choose` serve these rows, which may repeat, instead of the
        last step's."""
        ...

    def edit(
        self,
        logits_NV: "torch.Tensor",
        samples: "SampleInputs",
        needs: Needs,
        table: "EditTable | None",
    ) -> "torch.Tensor":
        """Return the logits [N, V] with lists, biases, penalties and masks applied. Only masks
        change the input in place. table: of lists and biases; None if `needs` has no edits."""
        ...

    def choose(
        self, logits_NV: "torch.Tensor", samples: "SampleInputs", needs: Needs
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Choose a token per row, int64 [N]; return also whether any was allowed, bool [N]."""
        ...

    def best_of_part(
        self, logits_NW: "torch.Tensor", samples: "SampleInputs", first: int
    ) -> "torch.Tensor":
        """Choose among the tokens from `first` on, without filters. Return pairs of a score and a
        token id, float64 [N, 2]. The score is -inf if no token can be chosen, inf if the logits are
        malformed."""
        ...

    def advance(
        self, gathered: Gathered, ids_N: "torch.Tensor", is_valid_N: "torch.Tensor"
    ) -> None:
        """Store the chosen tokens [N], move the counters, and write the tokens (-1 where invalid)
        to the step's result slot. Repeated calls change nothing."""
        ...
