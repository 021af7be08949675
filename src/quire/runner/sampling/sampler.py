"""Sampling: from logits to tokens, with only the work that a step's rows need. No torch.

Order, as in vLLM: log-probabilities come from the raw logits. Then logits processors, lists,
biases, penalties, the grammar's mask and DRY change them. The choice is greedy, or uses
temperature, min-p, top-k, top-p, XTC and random noise. A row's token never depends on which other
rows are in the step. A step of greedy rows is one arg max.

Shape legend: N sampling rows of the step (or slots for them), V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart
from quire.runner.attachment import EditLists, SamplingFeature, SamplingPart
from quire.runner.step_ops import (
    ALL_LOGPROBS,
    NO_LOGPROBS,
    RECORDED_CANDIDATES,
    Needs,
    SamplingFlags,
    SamplingRequests,
    StepOps,
    requests_features,
)

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

    from quire.ops.rows.step_inputs import SampleInputs

Rows = npt.NDArray[np.int32]


class Vocabulary:
    """Vocabulary that a step's rows choose from, whole on this rank. size: number of its tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def whole(self, logits: "torch.Tensor") -> "torch.Tensor":
        """Return the logits of the whole vocabulary, [N, V], from a rank's logits."""
        return logits

    def needed(self, logits: "torch.Tensor", needs: Needs) -> "torch.Tensor":
        """Return the part of the logits [N, V] that sampling needs."""
        return logits

    def choose(
        self, ops: StepOps, logits: "torch.Tensor", samples: "SampleInputs", needs: Needs
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Choose from the logits [N, V]; see StepOps."""
        return ops.choose(logits, samples, needs)


class Sampler:
    """Sampling of each row, and the choice for a step. The rows' columns hold the same parameters
    for the device. edits: the feature that the step operations carry out; None if there is none."""

    def __init__(
        self,
        ops: StepOps,
        max_num_rows: int,
        vocabulary: Vocabulary,
        features: Sequence[SamplingFeature] = (),
        edits: EditLists | None = None,
    ) -> None:
        self.vocabulary, self.vocab_size = vocabulary, vocabulary.size
        self.flags = SamplingFlags.of_rows(max_num_rows)
        self.features = list(features)
        self._with_features = set[int]()  # rows that request one of the features
        self._ops, self._edits = ops, edits
        self._last: SamplingRequests | None = None  # until a row starts, ends or forks
        self._last_needs: Needs | None = None

    def start_row(self, start: RowStart) -> None:
        """Assign a row to a sequence."""
        self._last = None
        self.flags.start(start)
        self._forget(start.row)
        if requests_features(start):
            self._with_features.add(start.row)
            for feature in self.features:
                feature.start(start)

    def release_rows(self, rows: Rows) -> None:
        """Release rows that sequences have left."""
        self._last = None
        self.flags.release(rows)
        for row in self._with_features.intersection(rows.tolist()):
            self._forget(row)

    def copy_row(self, parent: int, child: int) -> None:
        """Copy a parent's sampling features to its forked child."""
        self._last = None
        self.flags.copy(parent, child)
        self._forget(child)
        if parent in self._with_features:
            self._with_features.add(child)
            for feature in self.features:
                feature.copy(parent, child)

    def _forget(self, row: int) -> None:
        if row in self._with_features:
            self._with_features.remove(row)
            for feature in self.features:
                feature.release(row)

    def requested(self, rows: Rows, masked_rows: Rows | None = None) -> SamplingRequests:
        """Return the requested features of rows. masked_rows: rows with a mask, also others. A
        repeated plan has the same array of rows, so its requests are found once."""
        if masked_rows is not None and len(masked_rows):
            masked = np.flatnonzero(np.isin(rows, masked_rows))
            return self._requested(rows, masked)
        if self._last is None or self._last.rows is not rows:
            self._last, self._last_needs = self._requested(rows, np.empty(0, np.intp)), None
        return self._last

    def _requested(self, rows: Rows, masked: npt.NDArray[np.intp]) -> SamplingRequests:
        flags = self.flags.at(rows)
        if not flags.has_edits.any():
            return SamplingRequests(rows, flags, masked=masked)
        assert self._edits is not None, "rows have edits, and no table has them"
        positions = np.flatnonzero(flags.has_edits)
        return SamplingRequests(rows, flags, self._edits.spans(rows, positions), masked)

    def needs(self, requested: SamplingRequests) -> Needs:
        """Return the needs of a step whose sampling rows requested these features."""
        if requested is not self._last:
            return self._needs_of(requested)
        if self._last_needs is None:
            self._last_needs = self._needs_of(requested)
        return self._last_needs

    def _needs_of(self, requested: SamplingRequests) -> Needs:
        flags, num_logprobs = requested.flags, requested.flags.num_logprobs
        bits: list[bool] = np.asarray(flags.bits_6R.any(axis=1)).tolist()
        _, has_filters, has_penalties, _, has_extras, _ = bits
        needed_candidates = int(num_logprobs.max(initial=NO_LOGPROBS))
        if needed_candidates != NO_LOGPROBS and (num_logprobs == ALL_LOGPROBS).any():
            needed_candidates = self.vocab_size
        elif needed_candidates >= 0:
            needed_candidates = next(
                (num for num in RECORDED_CANDIDATES if num >= needed_candidates), needed_candidates
            )
        return Needs(
            has_filters,
            has_penalties,
            self._edits.generation if requested.spans and self._edits is not None else None,
            min(needed_candidates, self.vocab_size),
            len(requested.masked) > 0,
            len(requested.masked) > 0 and bool(requested.masked_beams.any()),
            has_extras,
        )

    def parts(self, needs: Needs, requested: SamplingRequests | None = None) -> list[SamplingPart]:
        """Return the features' parts in a step; without `requested`, in a recorded step."""
        if needs.num_candidates == NO_LOGPROBS and not needs.has_extras:
            return []
        parts = (feature.part_of(needs, requested) for feature in self.features)
        return [part for part in parts if part is not None]

    def sample(
        self,
        logits_NV: "torch.Tensor",
        samples: "SampleInputs",
        needs: Needs,
        parts: Sequence[SamplingPart] = (),
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Choose a token per row, int64 [N]; also return whether any token could be chosen, bool
        [N].

        logits: [N, V] of any float dtype, as much of the model's as the vocabulary needs; masks and
        parts may be written into them.
        """
        for part in parts:
            logits_NV = part.before(logits_NV)
        table = None if needs.edits is None or self._edits is None else self._edits.table
        edited_NV = self._ops.edit(logits_NV, samples, needs, table)
        for part in parts:
            part.edited(edited_NV)
        ids_N, is_valid_N = self.vocabulary.choose(self._ops, edited_NV, samples, needs)
        for part in reversed(parts):
            ids_N = part.chosen(edited_NV, ids_N, samples)
        return ids_N, is_valid_N
