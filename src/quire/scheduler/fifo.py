"""First in, first out with a token budget (T algorithm 1)."""

from quire.scheduler.sequence import Sequence


class Fifo:
    """Ordered by arrival; a preempted sequence, older than those that wait, goes first."""

    def __init__(self) -> None:
        self._queue: dict[int, Sequence] = {}  # by arrival, in order
        self._preempted: dict[int, Sequence] = {}

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence.arrival] = sequence

    def requeue(self, sequence: Sequence) -> None:
        self._preempted[sequence.arrival] = sequence

    def peek(self) -> Sequence | None:
        if self._preempted:
            return self._preempted[min(self._preempted)]
        return next(iter(self._queue.values()), None)

    def remove(self, sequence: Sequence) -> None:
        self._queue.pop(sequence.arrival, None)
        self._preempted.pop(sequence.arrival, None)

    def waiting(self) -> list[Sequence]:
        first = [self._preempted[arrival] for arrival in sorted(self._preempted)]
        return first + list(self._queue.values())

    def __len__(self) -> int:
        return len(self._queue) + len(self._preempted)
