"""Sequences that wait for a row: priority classes; in each the preempted ones, then the tenant that
was served least, then what its policy says. First in, first out is the default (T algorithm 1);
other policies are in `scheduler/policy`, and packages can bring one (docs/extend/policies.md).
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence

# When so many times the tokens before a request have been computed, its turn has come.
PATIENCE = 1.8


class Progress(Protocol):
    """What a policy may know of the scheduler."""

    num_planned_tokens: int  # so far: the scheduler's own clock

    def remaining(self, sequence: Sequence) -> int:
        """Count the tokens that a sequence lacks until it samples, without those of its present
        hit."""
        ...

    def num_tokens_under_way(self) -> int:
        """Count the tokens that all that run lack until they sample."""
        ...


class Policy(Protocol):
    """A queue of sequences that have not run yet."""

    def push(self, sequence: Sequence) -> None:
        """Take in a new sequence."""
        ...

    def peek(self) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        ...

    def pass_over(self, sequence: Sequence) -> None:
        """Pass over the one at the head for now: a prompt under way goes first."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        ...

    def rank(self, sequence: Sequence) -> int:
        """Rank the one at the head, or one whose prompt is being computed. Where these compete for
        the tokens of a step, the smallest rank gets them."""
        ...

    def waiting(self) -> list[Sequence]:
        """List all for those who watch, in the order in which they are likely to be admitted as
        far as that is known without asking for `remaining`: a look-up names blocks, and would make
        a run that is watched another one."""
        ...

    def __len__(self) -> int: ...


MakePolicy = Callable[[Progress], Policy]


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


MOST_ABSENT = 4096  # tenants without a request whose counters are kept


@dataclass(slots=True)
class Tenant:
    """slot: its place among the counters. num_requests: unfinished ones."""

    slot: int
    num_requests: int = 0


class LeastServed:
    """The one of some tenants that was served least; of equals, the one that was added first.

    Counters only grow, so that an entry can be too small but never too large: it is put right when
    it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._numbers: dict[str, int] = {}  # of the entry that counts
        self._num_added = 0

    def add(self, name: str, served: int) -> None:
        self._numbers[name] = self._num_added
        heapq.heappush(self._heap, (served, self._num_added, name))
        self._num_added += 1

    def first(self, names: Collection[str], served: Callable[[str], int]) -> str:
        """Return the least served of `names`, all of which were added; the others are forgotten."""
        if len(self._heap) > 2 * len(names) + 64:  # of those that left and came back several times
            self._numbers = {name: self._numbers[name] for name in names}
            self._heap = [(served(name), number, name) for name, number in self._numbers.items()]
            heapq.heapify(self._heap)
        while True:
            was, number, name = self._heap[0]
            if name not in names or self._numbers[name] != number:
                heapq.heappop(self._heap)
            elif (now := served(name)) > was:
                heapq.heapreplace(self._heap, (now, number, name))
            else:
                return name


class Tenants:
    """The counters of all tenants that have a request, and of those that left last."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()  # who left first comes first
        self._present: set[str] = set()
        self._least = LeastServed()
        self._served = np.zeros(16, np.int64)
        self._free_slots = list(range(15, -1, -1))

    def served(self, name: str) -> int:
        """Return a tenant's counter, in tokens; the smallest comes first."""
        return int(self._served[self._tenants[name].slot])

    def enter(self, name: str) -> int:
        """Count a request of this tenant that has come; returns the tenant's slot."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._new_slot())
        if tenant.num_requests == 0:
            self._absent.pop(name, None)
            if self._present:
                least = self.served(self._least.first(self._present, self.served))
                # One less: of equals, who comes back goes first.
                self._served[tenant.slot] = max(self._served[tenant.slot], least - 1)
            self._present.add(name)
            self._least.add(name, self.served(name))
        tenant.num_requests += 1
        return tenant.slot

    def leave(self, name: str) -> None:
        """Count a request of this tenant that has ended."""
        tenant = self._tenants[name]
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            self._present.remove(name)
            self._absent[name] = None
            if len(self._absent) > MOST_ABSENT:
                gone, _ = self._absent.popitem(last=False)
                self._free_slots.append(self._tenants.pop(gone).slot)

    def charge(self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int32]) -> None:
        """Charge tenants for tokens that were planned for their rows. Both [N]."""
        if len(self._present) == 1:
            self._served[slots[0]] += num_tokens.sum()
        else:
            np.add.at(self._served, slots, num_tokens)

    def _new_slot(self) -> int:
        if not self._free_slots:
            size = len(self._served)
            self._served = np.concatenate([self._served, np.zeros(size, np.int64)])
            self._free_slots = list(range(2 * size - 1, size - 1, -1))
        slot = self._free_slots.pop()
        self._served[slot] = 0
        return slot


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


class SchedulerProgress:
    """num_planned_tokens: so far; the scheduler's own clock."""

    def __init__(self, rows: Rows, memory: Memory) -> None:
        self.num_planned_tokens = 0
        self._rows, self._memory = rows, memory

    def remaining(self, sequence: Sequence) -> int:
        """Count the tokens that a sequence lacks until it samples; prefix hits left out, as of
        now."""
        if sequence.row >= 0:
            table = self._rows.table
            return int(table.total[sequence.row] - table.computed[sequence.row])
        return sequence.num_known_tokens - self._memory.num_found_tokens(sequence)

    def num_tokens_under_way(self) -> int:
        """Count the tokens that those that run lack until they sample."""
        return int(self._rows.needs(self._rows.running).sum())
