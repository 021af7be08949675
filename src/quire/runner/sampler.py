"""From logits to tokens: what each row asked for, with as little work as the rows of a step need.

Order, as in vLLM: log-probabilities from the raw logits; masks, biases, penalties; the greedy
choice, or temperature, min-p, top-k, top-p and a random choice. A row's token never depends on
which other rows are in the step. A step of greedy rows is one arg max.

Shape legend: N sampling rows of the step (or places for them), V vocabulary, C candidates.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.ops.host_memory import to_device
from quire.ops.logprobs import TokenLogprobs, token_logprobs
from quire.ops.step_inputs import SampleInputs
from quire.runner.edits import Edits
from quire.runner.sampling_flags import ALL_LOGPROBS, NO_LOGPROBS, SamplingFlags
from quire.runner.step_ops import RECORDED_CANDIDATES, Asked, Needs, StepOps

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WantedLogprobs:
    """Log-probabilities that rows asked for: how many candidates each, and at which places among
    the step's sampling rows they are."""

    rows: Rows
    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]


class Sampler:
    """How each row samples, and the choice for a step. The rows' columns hold the same for the
    device."""

    def __init__(self, ops: StepOps, edits: Edits, max_num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.flags = SamplingFlags.of_rows(max_num_rows)
        self._ops, self._edits = ops, edits

    def start_row(self, start: RowStart) -> None:
        """Give a row to a sequence."""
        self._edits.release(start.row)
        self.flags.start(start)
        if self.flags.has_edits[start.row]:
            self._edits.start(start)

    def release_rows(self, rows: Rows) -> None:
        """Forget rows that sequences have left."""
        self.flags.release(rows)
        for row in rows.tolist():
            self._edits.release(row)

    def copy_row(self, parent: int, child: int) -> None:
        """Let a forked child sample as its parent."""
        self.flags.copy(parent, child)
        self._edits.copy(parent, child)

    def asked(self, rows: Rows) -> Asked:
        """Return what these rows asked for."""
        flags = self.flags.at(rows)
        places = np.flatnonzero(flags.has_edits).tolist() if flags.has_edits.any() else []
        return Asked(rows, flags, {n: self._edits.span(int(rows[n])) for n in places})

    def needs(self, asked: Asked) -> Needs:
        """Say what a step does in which rows sample that asked for this."""
        num_logprobs = asked.flags.num_logprobs
        wanted = int(num_logprobs.max(initial=NO_LOGPROBS))
        if wanted != NO_LOGPROBS and (num_logprobs == ALL_LOGPROBS).any():
            wanted = self.vocab_size
        elif wanted >= 0:
            wanted = next((num for num in RECORDED_CANDIDATES if num >= wanted), wanted)
        return Needs(
            bool(asked.flags.has_filter.any()),
            bool(asked.flags.has_penalties.any()),
            self._edits.generation if asked.spans else None,
            min(wanted, self.vocab_size),
        )

    def wanted(self, asked: Asked) -> list[WantedLogprobs]:
        """Say which rows asked for log-probabilities: those with few candidates share one pass,
        those that want the vocabulary another one."""
        nums, found = asked.flags.num_logprobs, list[WantedLogprobs]()
        if (nums == NO_LOGPROBS).all():
            return found
        for is_in_part in nums >= 0, nums == ALL_LOGPROBS:
            places = np.flatnonzero(is_in_part)
            if len(places):
                counts = np.where(nums == ALL_LOGPROBS, self.vocab_size, nums)[places]
                found.append(WantedLogprobs(asked.rows[places], counts, places))
        return found

    def choose(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token per row, int64 [N], and whether there was one to choose, bool [N].

        logits: of any float dtype, the raw output of the model; they are not changed.
        """
        edited_NV = self._ops.edit(logits_NV, samples, needs, self._edits.table)
        # What else forbids tokens, such as a grammar, has its place here.
        return self._ops.choose(edited_NV, samples, needs)

    def logprobs(
        self,
        logits_NV: torch.Tensor,
        ids_N: torch.Tensor,
        needs: Needs,
        wanted: list[WantedLogprobs] | None,
    ) -> list[torch.Tensor]:
        """Tell log-probabilities of the chosen tokens and of the best ones: for all rows, where
        that is recorded, else for those that want them. Three tensors for each of `wanted`."""
        if needs.num_candidates == NO_LOGPROBS:
            return []
        if wanted is None:
            return logprob_tensors(token_logprobs(logits_NV, ids_N, needs.num_candidates))
        found = []
        for part in wanted:
            index = to_device(part.places, logits_NV.device)
            some_NV, ids = logits_NV.index_select(0, index), ids_N.index_select(0, index)
            found += logprob_tensors(token_logprobs(some_NV, ids, int(part.counts.max())))
        return found


def logprob_tensors(found: TokenLogprobs) -> list[torch.Tensor]:
    """Return what is sent to the host of log-probabilities."""
    return [found.token_ids, found.logprobs, found.ranks]
