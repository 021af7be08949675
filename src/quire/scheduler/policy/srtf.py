"""Shortest remaining token first (T algorithm 2): who is nearest to its next token comes first.

A request that is admitted may put blocks into the index that others hit, so the remaining tokens of
all that wait are looked up again each time; that costs time in proportion to their number, and long
prompts can starve. `two_level.py` bounds both.
"""

from quire.scheduler.core.queue import Progress
from quire.scheduler.core.sequence import Sequence


class Srtf:
    """Ordered by remaining tokens, then by arrival."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._waiting: dict[int, Sequence] = {}  # by arrival

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        return min(self._waiting.values(), key=self._order, default=None)

    def pass_over(self, sequence: Sequence) -> None:
        pass

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.arrival]

    def rank(self, sequence: Sequence) -> int:
        return self._progress.remaining(sequence)

    def waiting(self) -> list[Sequence]:
        """List all, in the order that they would have if nothing of them were cached."""
        return sorted(self._waiting.values(), key=lambda s: (s.num_known_tokens, s.arrival))

    def __len__(self) -> int:
        return len(self._waiting)

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return self._progress.remaining(sequence), sequence.arrival
