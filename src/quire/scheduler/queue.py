"""Who waits for a row: priority classes; in each the preempted, then the tenant that was served
least, then what its policy says."""

import heapq

from quire.scheduler.policy import MakePolicy, Policy, Progress
from quire.scheduler.sequence import Sequence
from quire.scheduler.tenants import LeastServed, Tenants

Rank = tuple[int, int, int]


class _Class:
    """The waiting sequences of one priority. preempted: by arrival; new: by tenant, none empty."""

    __slots__ = ("least", "new", "preempted")

    def __init__(self) -> None:
        self.preempted: dict[int, Sequence] = {}
        self.new: dict[str, Policy] = {}
        self.least = LeastServed()


class WaitingQueue:
    """One policy per priority class and tenant; a class with a lower number goes first, as a whole.

    Nobody passes the one at the head, so that a large request does not starve, and so that nothing
    of its priority or a lower one comes in while a group is swapped out (P 4.5).
    """

    def __init__(self, make_policy: MakePolicy, progress: Progress) -> None:
        self.tenants = Tenants()
        self._make_policy = make_policy
        self._progress = progress
        self._ranks = make_policy(progress)  # of sequences that run already
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # a heap, with classes that have become empty
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def push(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        waits, name = self._class_of(sequence), sequence.request.tenant
        if name not in waits.new:
            waits.new[name] = self._make_policy(self._progress)
            waits.least.add(name, self.tenants.served(name))
        waits.new[name].push(sequence)
        self._num += 1

    def requeue(self, sequence: Sequence) -> None:
        """Take a preempted sequence back: it comes before all new ones of its class."""
        self._class_of(sequence).preempted[sequence.arrival] = sequence
        self._num += 1

    def peek(self) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        while self._priorities:
            found = self._classes[self._priorities[0]]
            if found.preempted:
                return found.preempted[min(found.preempted)]
            if found.new:
                return self._next_policy(found).peek()
            del self._classes[heapq.heappop(self._priorities)]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        found, name = self._classes[sequence.priority], sequence.request.tenant
        if found.preempted.pop(sequence.arrival, None) is None:
            found.new[name].remove(sequence)
            if not len(found.new[name]):
                del found.new[name]
        self._num -= 1

    def rank(self, sequence: Sequence) -> Rank:
        """Rank new sequences and prompts under way where they compete: the smallest is served
        first. Not for those that were preempted."""
        served = self.tenants.served(sequence.request.tenant)
        return sequence.priority, served, self._ranks.rank(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """Pass over the new one at the head for now: a prompt under way goes first."""
        self._classes[sequence.priority].new[sequence.request.tenant].pass_over(sequence)

    def is_preempted(self, sequence: Sequence) -> bool:
        """Tell whether this waiting sequence has run before."""
        return sequence.arrival in self._classes[sequence.priority].preempted

    def waiting(self) -> list[Sequence]:
        """List all, by class, the preempted before the new ones."""
        found: list[Sequence] = []
        for priority in sorted(self._classes):
            waits = self._classes[priority]
            found += [waits.preempted[arrival] for arrival in sorted(waits.preempted)]
            for policy in waits.new.values():
                found += policy.waiting()
        return found

    def _next_policy(self, waits: _Class) -> Policy:
        """Return the policy of the tenant that was served least."""
        return waits.new[waits.least.first(waits.new, self.tenants.served)]

    def _class_of(self, sequence: Sequence) -> _Class:
        found = self._classes.get(sequence.priority)
        if found is None:
            found = self._classes[sequence.priority] = _Class()
            heapq.heappush(self._priorities, sequence.priority)
        return found
