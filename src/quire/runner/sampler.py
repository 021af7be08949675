"""From logits to tokens: what each row asked for, with as little work as the rows of a step need.

Order, as in vLLM: log-probabilities from the raw logits; logits processors, lists, biases,
penalties, the mask of a grammar, DRY; the greedy choice, or temperature, min-p, top-k, top-p, XTC
and a random choice. A row's token never depends on which other rows are in the step. A step of
greedy rows is one arg max.

Shape legend: N sampling rows of the step (or places for them), V vocabulary, C candidates.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.ops.host_memory import to_device
from quire.ops.logprobs import TokenLogprobs, named_logprobs, token_logprobs
from quire.ops.step_inputs import SampleInputs
from quire.runner.edits import Edits
from quire.runner.extras import Extras, StepExtras
from quire.runner.named_tokens import NamedTokens
from quire.runner.sampling_flags import ALL_LOGPROBS, NO_LOGPROBS, SamplingFlags
from quire.runner.step_ops import RECORDED_CANDIDATES, Asked, Needs, StepOps
from quire.runner.vocabulary import Vocabulary

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WantedLogprobs:
    """Log-probabilities that rows asked for: how many candidates each, and at which places among
    the step's sampling rows they are. is_masked: the candidates are those that masks allow.
    token_ids: the candidates, [places, C], padded; None: the most probable ones."""

    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    is_masked: bool = False
    token_ids: npt.NDArray[np.int64] | None = None


class Sampler:
    """How each row samples, and the choice for a step. The rows' columns hold the same for the
    device."""

    def __init__(
        self,
        ops: StepOps,
        edits: Edits,
        extras: Extras,
        max_num_rows: int,
        vocabulary: Vocabulary,
    ) -> None:
        self.vocabulary, self.vocab_size = vocabulary, vocabulary.size
        self.flags = SamplingFlags.of_rows(max_num_rows)
        self._ops, self._edits, self._extras = ops, edits, extras
        self._named = NamedTokens()

    def start_row(self, start: RowStart) -> None:
        """Give a row to a sequence."""
        self._edits.release(start.row)
        self._extras.start(start)
        self._named.start(start)
        self.flags.start(start)
        if self.flags.has_edits[start.row]:
            self._edits.start(start)

    def release_rows(self, rows: Rows) -> None:
        """Forget rows that sequences have left."""
        self.flags.release(rows)
        for row in rows.tolist():
            self._edits.release(row)
            self._extras.release(row)
            self._named.release(row)

    def copy_row(self, parent: int, child: int) -> None:
        """Let a forked child sample as its parent."""
        self.flags.copy(parent, child)
        self._edits.copy(parent, child)
        self._extras.copy(parent, child)
        self._named.copy(parent, child)

    def asked(self, rows: Rows, masked_rows: Rows | None = None) -> Asked:
        """Return what these rows asked for. masked_rows: those with a mask; others may be among
        them."""
        flags = self.flags.at(rows)
        places = np.flatnonzero(flags.has_edits).tolist() if flags.has_edits.any() else []
        spans, extras = {n: self._edits.span(int(rows[n])) for n in places}, self._extras.of(rows)
        if masked_rows is None or len(masked_rows) == 0:
            return Asked(rows, flags, spans, extras=extras)
        return Asked(rows, flags, spans, np.flatnonzero(np.isin(rows, masked_rows)), extras)

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
            len(asked.masked) > 0,
            bool(asked.masked_beams.any()),
            asked.extras is not None,
            self._named.has_any(asked.rows),
        )

    def wanted(self, asked: Asked) -> list[WantedLogprobs]:
        """Say which rows asked for log-probabilities: those with few candidates share one pass,
        those that want the vocabulary another one, as do masked beams, and those that name
        tokens."""
        nums, found = asked.flags.num_logprobs, list[WantedLogprobs]()
        if (nums == NO_LOGPROBS).all():
            return found
        masked, named = asked.masked_beams, self._named.among(asked.rows)
        is_few = (nums >= 0) & ~named
        for is_in_part in is_few & ~masked, nums == ALL_LOGPROBS, is_few & masked:
            places = np.flatnonzero(is_in_part)
            if len(places):
                counts = np.where(nums == ALL_LOGPROBS, self.vocab_size, nums)[places]
                is_masked = bool(masked[places[0]])
                found.append(WantedLogprobs(counts, places, is_masked))
        if named.any():
            counts, ids = self._named.table(asked.rows[named])
            found.append(WantedLogprobs(counts, np.flatnonzero(named), token_ids=ids))
        return found

    def sample(
        self,
        logits_NV: torch.Tensor,
        samples: SampleInputs,
        needs: Needs,
        wanted: list[WantedLogprobs] | None,
        extras: StepExtras | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Choose a token per row, int64 [N]; tell whether there was one to choose, bool [N]; and
        log-probabilities, three tensors for each of `wanted`, or for all rows where that is
        recorded (None).

        logits: of any float dtype, as many of the model's as the vocabulary says are needed; masks
        and extras may be written into them.
        """
        raw = self._raw(logits_NV, needs, wanted)
        if extras is not None:
            logits_NV = extras.replace(logits_NV)
        edited_NV = self._ops.edit(logits_NV, samples, needs, self._edits.table)
        if extras is not None:
            extras.penalise(edited_NV)
        ids_N, is_valid_N = self.vocabulary.choose(self._ops, edited_NV, samples, needs)
        if extras is not None:
            ids_N = extras.choose(edited_NV, ids_N, samples)
        if not raw:
            return ids_N, is_valid_N, []
        if wanted is None:
            found = token_logprobs(raw[0], ids_N, needs.num_candidates)
            return ids_N, is_valid_N, logprob_tensors(found)
        tensors = []
        for part, some_NV in zip(wanted, raw, strict=True):
            index = to_device(part.places, ids_N.device)
            count, ids = int(part.counts.max()), ids_N.index_select(0, index)
            if part.token_ids is not None:
                named = to_device(part.token_ids, ids_N.device)
                tensors += logprob_tensors(named_logprobs(some_NV, ids, named))
            elif part.is_masked:
                masked_NV = edited_NV.index_select(0, index)
                tensors += logprob_tensors(token_logprobs(masked_NV, ids, count, some_NV))
            else:
                tensors += logprob_tensors(token_logprobs(some_NV, ids, count))
        return ids_N, is_valid_N, tensors

    def _raw(
        self, logits_NV: torch.Tensor, needs: Needs, wanted: list[WantedLogprobs] | None
    ) -> list[torch.Tensor]:
        """Return the logits whose log-probabilities will be told, which no mask changes: a tensor
        for each of `wanted`, or one of all rows."""
        if needs.num_candidates == NO_LOGPROBS:
            return []
        if wanted is None:
            is_changed = needs.has_masks and not needs.makes_copy
            return [logits_NV.clone() if is_changed else logits_NV]
        places = (to_device(part.places, logits_NV.device) for part in wanted)
        return [logits_NV.index_select(0, index) for index in places]


def logprob_tensors(found: TokenLogprobs) -> list[torch.Tensor]:
    """Return what is sent to the host of log-probabilities."""
    return [found.token_ids, found.logprobs, found.ranks]
