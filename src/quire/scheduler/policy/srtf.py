"""Shortest remaining tokens first (T algorithm 2): the sequence nearest to its next token goes
first.

An admitted request may enter blocks in the index that other requests hit. So the remaining tokens
of all waiting sequences are looked up again for each admission. That takes time in proportion to
their number, and long prompts can starve. `two_level.py` bounds both.
"""

from quire.scheduler.core.queue import Progress
from quire.scheduler.core.sequence import Sequence


class Srtf:
    """Policy in order of remaining tokens, then of arrival."""

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
        """Return all sequences, in order of admission if none of their tokens were cached."""
        return sorted(self._waiting.values(), key=lambda s: (s.num_known_tokens, s.arrival))

    def __len__(self) -> int:
        return len(self._waiting)

    def _order(self, sequence: Sequence) -> tuple[int, int]:
        return self._progress.remaining(sequence), sequence.arrival
