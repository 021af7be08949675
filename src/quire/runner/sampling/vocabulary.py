"""Vocabulary that a step's rows choose from: whole on this rank, or a part on each rank.

Noise belongs to a token's id. So the ranks' choices from their parts compete by their scores alone.
Ranks exchange a pair of numbers for each row instead of its logits. All ranks find the same token,
which is also the token that one rank with all logits finds. A step with filters, penalties, lists,
masks or log-probabilities needs more. Then the ranks first gather the logits of the step's rows,
and each does the same work as a single rank.

Shape legend: N rows, V vocabulary, W columns of a part, G ranks.
"""

import torch

from quire.ops.collective import RankGroup, all_gather
from quire.ops.rows.step_inputs import SampleInputs
from quire.runner.sampling.sampler import Vocabulary
from quire.runner.step_ops import Needs, StepOps

Chosen = tuple[torch.Tensor, torch.Tensor]


class SharedVocabulary(Vocabulary):
    """Vocabulary divided among ranks. Rank g has the logits of tokens g * W to (g + 1) * W - 1,
    with W = ceil(V / G). Columns after the last token are ignored. A model may also give all ranks
    all logits."""

    def __init__(self, size: int, group: RankGroup) -> None:
        super().__init__(size)
        self._group = group
        self._first = group.rank * -(-size // group.size)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """See Vocabulary."""
        if logits.shape[1] == self.size:
            return logits
        parts = all_gather(logits.contiguous(), self._group)
        return torch.cat(parts.unbind(), dim=1)[:, : self.size].contiguous()

    def needed(self, logits: torch.Tensor, needs: Needs) -> torch.Tensor:
        """See Vocabulary."""
        return self.whole(logits) if needs.all_logits else logits

    def choose(
        self, ops: StepOps, logits: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> Chosen:
        """See Vocabulary."""
        if logits.shape[1] == self.size:
            return ops.choose(logits, samples, needs)
        pairs_N2 = self._best_of_own(ops, logits, samples)
        return best_of_parts(all_gather(pairs_N2, self._group))

    def _best_of_own(
        self, ops: StepOps, logits: torch.Tensor, samples: SampleInputs
    ) -> torch.Tensor:
        """Choose among the columns [N, W] that are tokens; ignore the padding after the
        last token."""
        num = min(max(self.size - self._first, 0), logits.shape[1])
        if num == 0:
            return logits.new_tensor([-torch.inf, 0.0], dtype=torch.float64).repeat(len(logits), 1)
        own = logits if num == logits.shape[1] else logits[:, :num].contiguous()
        return ops.best_of_part(own, samples, self._first)


def vocabulary_of(size: int, group: RankGroup) -> Vocabulary:
    """Return the vocabulary of ranks that share each layer."""
    return Vocabulary(size) if group.size == 1 else SharedVocabulary(size, group)


def best_of_parts(pairs_GN2: torch.Tensor) -> Chosen:
    """Return the ids of the largest scores, int64 [N], and whether they are valid, bool [N]. Of
    equal scores the smallest id wins. pairs: score and id, float64; a score of inf marks a row with
    malformed logits."""
    scores_GN, ids_GN = pairs_GN2.unbind(-1)
    best_N = scores_GN.amax(dim=0)
    ids_N = torch.where(scores_GN == best_N, ids_GN, torch.inf).amin(dim=0)
    is_valid_N = best_N.isfinite()
    return torch.where(is_valid_N, ids_N, 0.0).long(), is_valid_N
