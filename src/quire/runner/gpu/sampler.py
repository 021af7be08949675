"""Choosing a step's tokens on a GPU, in the order of `quire.runner.sampler`: a fixed sequence of
launches for what the rows of a step need, so that it can be recorded.

Shape legend: N sampling rows of the step (or places for them), V vocabulary, C candidates.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Candidates, RowStart
from quire.ops.kernels.logprobs import token_logprobs
from quire.ops.kernels.penalties import apply_penalties
from quire.ops.kernels.sampling import sample
from quire.ops.kernels.sampling_edits import edit_logits
from quire.ops.kernels.step_inputs import SampleInputs
from quire.ops.logprobs import TokenLogprobs
from quire.ops.memory import to_device
from quire.runner.gpu.columns import narrow, penalties_of, sampling_columns
from quire.runner.gpu.device import Device
from quire.runner.gpu.edits import Edits
from quire.runner.gpu.rows import GpuRows
from quire.runner.sampler import to_candidates
from quire.runner.sampling_facts import ALL_LOGPROBS, NO_LOGPROBS, SamplingFacts

Rows = npt.NDArray[np.int32]

# Numbers of candidates for which a step is recorded; fewer are taken as the next of these.
RECORDED_CANDIDATES = (0, 5, 20)


@dataclass(frozen=True)
class Needs:
    """What a step's sampling does, beside choosing: part of a graph's key. edits: the generation of
    the table, None without. num_candidates: NO_LOGPROBS, or how many for each row."""

    has_filters: bool = False
    has_penalties: bool = False
    edits: int | None = None
    num_candidates: int = NO_LOGPROBS

    @property
    def can_be_recorded(self) -> bool:
        return self.num_candidates <= RECORDED_CANDIDATES[-1]


@dataclass(frozen=True)
class Wanted:
    """Log-probabilities that rows asked for: the rows' numbers, how many each, and which of the
    step's sampling rows they are."""

    rows: list[int]
    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


NOBODY = Wanted([], np.empty(0, np.int64), np.empty(0, np.int64))


class GpuSampler:
    """How each row samples, and the choice for a step."""

    def __init__(self, device: Device, rows: GpuRows, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.facts = SamplingFacts(rows.max_num_rows)
        self._device = device
        self._rows = rows
        self._edits = Edits(device, rows.max_num_rows)
        self._columns = sampling_columns(rows.state)
        self._counts_RV: torch.Tensor | None = None

    def start_row(self, start: RowStart) -> None:
        """A sequence takes a row. `GpuRows.apply` writes the columns."""
        self._edits.release(start.row)
        self.facts.start(start)
        if self.facts.has_edits[start.row]:
            self._edits.start(start)

    def release_rows(self, rows: Rows) -> None:
        self.facts.release(rows)
        for row in rows.tolist():
            self._edits.release(row)

    def copy_row(self, parent: int, child: int) -> None:
        self.facts.copy(parent, child)
        self._edits.copy(parent, child)

    def needs(self, rows: Rows) -> Needs:
        """Of a step in which these rows sample."""
        facts = self.facts
        wanted = int(facts.num_logprobs[rows].max(initial=NO_LOGPROBS))
        if (facts.num_logprobs[rows] == ALL_LOGPROBS).any():
            wanted = self.vocab_size
        elif wanted >= 0:
            wanted = next((num for num in RECORDED_CANDIDATES if num >= wanted), wanted)
        return Needs(
            bool(facts.has_filter[rows].any()),
            bool(facts.has_penalties[rows].any()),
            self._edits.generation if facts.has_edits[rows].any() else None,
            min(wanted, self.vocab_size),
        )

    def wanted(self, rows: Rows) -> Wanted:
        """Which of these rows asked for log-probabilities."""
        counts = self.facts.num_logprobs[rows]
        places = np.flatnonzero(counts != NO_LOGPROBS)
        counts = np.where(counts == ALL_LOGPROBS, self.vocab_size, counts)[places]
        return Wanted(rows[places].tolist(), counts, places)

    def choose(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token per row, int64 [N], and whether there was one to choose, bool [N].

        logits: of the model's dtype; they are not changed.
        """
        x_NV, lengths_N = logits_NV, samples.lengths
        if needs.edits is not None:
            places_N = narrow(self._rows.state, "edits").index_select(0, samples.rows)
            tokens_RM = self._rows.state.tokens_RM
            x_NV = edit_logits(
                x_NV, self._edits.table, places_N, tokens_RM, samples.rows, lengths_N,
                samples.prompt_lens,
            )  # fmt: skip
        if needs.has_penalties:
            if needs.edits is None:
                x_NV = x_NV.to(torch.float32, copy=True)
            self._penalise(x_NV, samples)
        return sample(x_NV, self._columns, lengths_N, samples.rows, has_filters=needs.has_filters)

    def logprobs(
        self, logits_NV: torch.Tensor, ids_N: torch.Tensor, needs: Needs, wanted: Wanted
    ) -> TokenLogprobs:
        """Of the chosen tokens and of the best ones: for all rows where that can be recorded, else
        for those that want it."""
        if not needs.can_be_recorded:
            index = to_device(wanted.places, logits_NV.device)
            logits_NV, ids_N = logits_NV.index_select(0, index), ids_N.index_select(0, index)
        return token_logprobs(logits_NV, ids_N, needs.num_candidates)

    def _penalise(self, logits_NV: torch.Tensor, samples: SampleInputs) -> None:
        """Rows without penalties count as if they had no tokens."""
        num_rows, device = len(logits_NV), logits_NV.device
        if self._counts_RV is None:
            shape = self._rows.max_num_rows, self.vocab_size
            self._counts_RV = torch.zeros(shape, dtype=torch.int32, device=device)
        state = self._rows.state
        is_penalised_N = narrow(state, "penalised").index_select(0, samples.rows)
        apply_penalties(
            logits_NV,
            torch.arange(num_rows, device=device),
            state.tokens_RM,
            samples.lengths * is_penalised_N,
            samples.prompt_lens,
            penalties_of(state, samples.rows),
            rows_P=samples.rows,
            counts_PV=self._counts_RV,
        )


def as_candidates(arrived: TokenLogprobs, needs: Needs, wanted: Wanted) -> dict[int, Candidates]:
    """Of the rows that asked, from what has come to the host."""
    if needs.can_be_recorded:
        index = torch.from_numpy(wanted.places)
        parts = arrived.token_ids, arrived.logprobs, arrived.ranks
        arrived = TokenLogprobs(*(part[index] for part in parts))
    return dict(zip(wanted.rows, to_candidates(arrived, wanted.counts), strict=True))
