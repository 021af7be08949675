"""Who waits for a row: priority classes; in each, the preempted before the new ones."""

import heapq
from collections.abc import Callable

from quire.scheduler.policy import Policy
from quire.scheduler.sequence import Sequence


class _Class:
    """The waiting sequences of one priority. preempted: by arrival."""

    __slots__ = ("new", "preempted")

    def __init__(self, policy: Policy) -> None:
        self.preempted: dict[int, Sequence] = {}
        self.new = policy

    def __len__(self) -> int:
        return len(self.preempted) + len(self.new)


class WaitingQueue:
    """One policy per priority class; a class with a lower number is served first, as a whole.

    Nobody passes the one at the head, so that a large request does not starve, and so that nothing
    of its priority or a lower one comes in while a group is swapped out (P 4.5).
    """

    def __init__(self, make_policy: Callable[[], Policy]) -> None:
        self._make_policy = make_policy
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # a heap, with classes that have become empty
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def push(self, sequence: Sequence) -> None:
        """A new sequence arrived."""
        self._class_of(sequence).new.push(sequence)
        self._num += 1

    def requeue(self, sequence: Sequence) -> None:
        """A sequence was preempted: it comes before all new ones of its class."""
        self._class_of(sequence).preempted[sequence.arrival] = sequence
        self._num += 1

    def peek(self) -> Sequence | None:
        """Whom to admit next, or None."""
        while self._priorities:
            found = self._classes[self._priorities[0]]
            if found.preempted:
                return found.preempted[min(found.preempted)]
            if len(found.new):
                return found.new.peek()
            del self._classes[heapq.heappop(self._priorities)]
        return None

    def remove(self, sequence: Sequence) -> None:
        """The sequence was admitted or has ended."""
        found = self._classes[sequence.priority]
        if found.preempted.pop(sequence.arrival, None) is None:
            found.new.remove(sequence)
        self._num -= 1

    def waiting(self) -> list[Sequence]:
        """All of them, in order."""
        found: list[Sequence] = []
        for priority in sorted(self._classes):
            preempted = self._classes[priority].preempted
            found += [preempted[arrival] for arrival in sorted(preempted)]
            found += self._classes[priority].new.waiting()
        return found

    def _class_of(self, sequence: Sequence) -> _Class:
        found = self._classes.get(sequence.priority)
        if found is None:
            found = self._classes[sequence.priority] = _Class(self._make_policy())
            heapq.heappush(self._priorities, sequence.priority)
        return found
