"""Drafter that repeats the acceptance of another model's drafts, for a model of random weights.

It knows the answer. At each place it proposes as many tokens as the other model's drafter did, and
as many of them are right. It is loaded as a drafter of a file (docs/extend/drafters.md).
"""

from benchmarks.models.drafts.record import REPLAYED, Replayed


class Replay:
    """Drafter of one sequence. The first token of its prompt names its answer and its record."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._replayed: Replayed | None = None

    def extend(self, token_ids: list[int]) -> None:
        if self._num_tokens == 0:
            self._replayed = REPLAYED.get(token_ids[0])
        self._num_tokens += len(token_ids)

    def propose(self, num: int) -> list[int]:
        if self._replayed is None:
            return []
        return self._replayed.drafts(self._num_tokens, num)
