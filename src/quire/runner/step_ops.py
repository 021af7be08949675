"""What a step does to the rows and to its logits, by kernels or by torch's operations.

A step is

    take an update  ->  gather  ->  forward pass  ->  edit  ->  choose  ->  advance

and before `edit` the step's masks are taken, if it has any. Each part may be carried out long after
it was asked for, so it reads nothing of the host that may change until then.

Shape legend: S scheduled rows, N sampling rows, T tokens of the step, V vocabulary, F forks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.base.masks import MaskPromise
from quire.ops.device_guesses import Runs
from quire.ops.logit_edits import EditTable
from quire.ops.step_inputs import SampleInputs, StepInputs
from quire.runner.device import Arrival
from quire.runner.extras import StepExtras
from quire.runner.row_updates import RowUpdates
from quire.runner.sampling_flags import NO_LOGPROBS, SamplingFlags

Int32 = npt.NDArray[np.int32]

# Numbers of candidates for which a step is recorded; fewer are taken as the next of these.
RECORDED_CANDIDATES = (0, 5, 20)


@dataclass(frozen=True)
class StepShape:
    """How large a step is, on the host: new tokens and context of each place for a row, which are
    upper bounds of what the device has; num_samples: rows that sample."""

    query_lens: Int32
    context_lens: Int32
    num_samples: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@dataclass(frozen=True)
class Asked:
    """What a step's sampling rows asked for. spans: of their edits, by their place. masked: the
    places of those with a token mask. extras: what no kernel does."""

    rows: Int32
    flags: SamplingFlags
    spans: dict[int, Int32]
    masked: npt.NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    extras: StepExtras | None = None

    @property
    def masked_beams(self) -> npt.NDArray[np.bool_]:
        """[N] which of them choose the candidates of a beam search among allowed tokens."""
        found = np.zeros(len(self.rows), bool)
        found[self.masked] = self.flags.is_beam[self.masked]
        return found


@dataclass(frozen=True)
class Sampling:
    """Who samples, and what the host knows of each of them: tokens, an upper bound of what the
    device has, and how many of these are prompt."""

    asked: Asked
    lengths: npt.NDArray[np.integer]
    prompt_lens: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepLists:
    """What a step serves: scheduled rows and how many tokens of each; sampling rows, and at which
    places among the scheduled ones those stand whose logits they use; where the step's tokens
    go."""

    rows: Int32
    num_tokens: Int32
    sampling: Sampling
    sample_places: npt.NDArray[np.intp]
    result_slot: int

    @property
    def sample_rows(self) -> Int32:
        return self.sampling.asked.rows


@dataclass(frozen=True)
class Needs:
    """What a step's sampling does, beside choosing: part of a graph's key. edits: the generation of
    the table, None without. num_candidates: NO_LOGPROBS, or how many for each row. has_beams: masks
    are for the candidates of beam searches, too. has_named: rows name the tokens whose
    log-probabilities they want."""

    has_filters: bool = False
    has_penalties: bool = False
    edits: int | None = None
    num_candidates: int = NO_LOGPROBS
    has_masks: bool = False
    has_beams: bool = False
    has_extras: bool = False
    has_named: bool = False

    @property
    def can_be_recorded(self) -> bool:
        is_rare = self.has_beams or self.has_extras or self.has_named
        return self.num_candidates <= RECORDED_CANDIDATES[-1] and not is_rare

    @property
    def all_logits(self) -> bool:
        """Tell whether more is done than a choice among all tokens by their logits and noise."""
        is_changed = self.has_penalties or self.edits is not None or self.has_masks
        is_told = self.num_candidates != NO_LOGPROBS
        return self.has_filters or is_changed or is_told or self.has_beams or self.has_extras

    @property
    def makes_copy(self) -> bool:
        """Tell whether `edit` changes a copy of the logits."""
        return self.edits is not None or self.has_penalties


@dataclass(frozen=True)
class Update:
    """Changes on their way to the rows. take: bring them in, before anything else of the step.
    hold: told by when they were read."""

    take: Callable[[], None]
    hold: Callable[[Arrival], None]


NO_UPDATE = Update(lambda: None, lambda arrival: None)


@dataclass(frozen=True)
class Gathered:
    """inputs: of the forward pass, without padded rows. contexts: tokens that each place for a row
    has with this step."""

    inputs: StepInputs
    samples: SampleInputs
    contexts: torch.Tensor


class StepOps(Protocol):
    """can_be_recorded: whether a graph can hold what it launches."""

    can_be_recorded: bool

    def fork(self, pairs_F2: Int32) -> None:
        """Make rows (parent, child) copies of others, behind all work that was given before. No
        child may be another fork's parent or child."""
        ...

    def prepare(self, updates: RowUpdates, lists: StepLists | None) -> Update:
        """Get changes ready; with a step's lists, that step comes next."""
        ...

    def prepare_masks(self, places: Int32, words: Int32) -> Update:
        """Get token masks ready, [M] places among the step's sampling rows and [M, W] words
        (`quire.ops.mask`), for `edit` to apply."""
        ...

    def gather(self, shape: StepShape) -> Gathered:
        """Gather the inputs of the step whose lists were taken last."""
        ...

    def serve(self, sampling: Sampling) -> None:
        """Let `edit` and `choose` serve these, a row as often as it is among them, instead of those
        of the step whose lists were taken last."""
        ...

    def guess(self, rows: Int32, nums: Int32, longest: int, runs: Runs) -> None:
        """Write so many guesses behind the last token of each of these rows
        (`quire.ops.device_guesses.guess_runs`)."""
        ...

    def edit(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs, table: EditTable
    ) -> torch.Tensor:
        """Return the logits with lists, biases, penalties and masks. Those that are given are
        changed by masks alone."""
        ...

    def choose(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token per row, int64 [N], and whether there was one to choose, bool [N]."""
        ...

    def best_of_part(
        self, logits_NW: torch.Tensor, samples: SampleInputs, first: int
    ) -> torch.Tensor:
        """Choose among the tokens from `first` on, without filters: pairs of a score and a token
        id, float64 [N, 2]. The score is -inf where there is nothing to choose, inf where the logits
        make no sense."""
        ...

    def advance(
        self,
        gathered: Gathered,
        ids_N: torch.Tensor,
        is_valid_N: torch.Tensor,
        results_QS: torch.Tensor,
    ) -> None:
        """Store the chosen tokens, move the counters, and leave the tokens, -1 where there was
        none, in the step's result slot. A second time it changes nothing."""
        ...


def prepared_masks(
    ops: StepOps,
    asked: Asked,
    promise: MaskPromise | None,
    depths: npt.NDArray[np.int64] | None = None,
) -> tuple[Update, dict[int, str]]:
    """Wait for a step's masks and get them ready: of its rows, whatever others there are; also
    returns what is wrong with rows. depths: behind which of its guesses each place is that asked;
    None: all are behind known tokens."""
    assert promise is not None, "a plan with masked rows comes with a promise"
    masks, which = promise.wait(), asked.masked
    behind = np.zeros(len(which), np.int64) if depths is None else depths[which]
    words = masks.of(asked.rows[which])[np.arange(len(which)), behind]
    return ops.prepare_masks(which.astype(np.int32), np.ascontiguousarray(words)), masks.errors
