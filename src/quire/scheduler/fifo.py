"""First in, first out with a token budget (T algorithm 1)."""

from quire.scheduler.sequence import Sequence


class Fifo:
    """Ordered by arrival."""

    def __init__(self) -> None:
        self._queue: dict[int, Sequence] = {}  # by arrival, in order

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        return next(iter(self._queue.values()), None)

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence.arrival]

    def waiting(self) -> list[Sequence]:
        return list(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue)
