"""First in, first out with a token budget (T algorithm 1)."""

from quire.scheduler.policy import Progress
from quire.scheduler.sequence import Sequence


class Fifo:
    """Ordered by arrival."""

    def __init__(self, progress: Progress) -> None:
        self._queue: dict[int, Sequence] = {}  # by arrival, in order

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        return next(iter(self._queue.values()), None)

    def pass_over(self, sequence: Sequence) -> None:
        pass

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence.arrival]

    def rank(self, sequence: Sequence) -> int:
        return sequence.arrival

    def waiting(self) -> list[Sequence]:
        return list(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue)
