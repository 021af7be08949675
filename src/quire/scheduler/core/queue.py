"""The waiting queue: priority classes, in each the preempted sequences, then the least served
tenant, then the order of its policy. The default is first in, first out (T algorithm 1). Others are
in `scheduler/policy`, and packages can bring one (docs/extend/policies.md).
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence

# A request's turn has come when this many times the tokens before it have been computed.
PATIENCE = 1.8


class Progress(Protocol):
    """What a policy may know of the scheduler."""

    num_planned_tokens: int  # so far: the scheduler's own clock

    def remaining(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence lacks until it samples, without its current hit."""
        ...

    def num_tokens_under_way(self) -> int:
        """Return the tokens that all running sequences lack until they sample."""
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
        """Pass over the head for now: a running prompt goes first."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        ...

    def rank(self, sequence: Sequence) -> int:
        """Return the rank of the head, or of a running prompt. The smallest rank is served first
        when they compete for the tokens of a step."""
        ...

    def waiting(self) -> list[Sequence]:
        """Return all sequences for observers, in the likely order of admission. Do not call
        `remaining`: it names blocks, so a watched run would differ from another one."""
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
    """slot: its place among the counters. num_requests: its unfinished requests."""

    slot: int
    num_requests: int = 0


class LeastServed:
    """Finds the least served tenant; among equals, the one that was added first.

    Counters only grow, so an entry is never too large. It is corrected when it comes to the top.
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
        """Return the least served of `names`, all of which were added, and forget the others."""
        if len(self._heap) > 2 * len(names) + 64:  # many have left and come back
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
    """The counters of all tenants with a request, and of the last that left."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()  # the first that left comes first
        self._present: set[str] = set()
        self._least = LeastServed()
        self._served = np.zeros(16, np.int64)
        self._free_slots = list(range(15, -1, -1))

    def served(self, name: str) -> int:
        """Return the number of tokens that a tenant was served."""
        return int(self._served[self._tenants[name].slot])

    def enter(self, name: str) -> int:
        """Count a new request of this tenant; return the tenant's slot."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._new_slot())
        if tenant.num_requests == 0:
            self._absent.pop(name, None)
            if self._present:
                least = self.served(self._least.first(self._present, self.served))
                # One less: among equals, a returning tenant goes first.
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


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one priority. preempted: by arrival. new: by tenant, none empty."""

    preempted: dict[int, Sequence] = field(default_factory=dict)
    new: dict[str, Policy] = field(default_factory=dict)
    least: LeastServed = field(default_factory=LeastServed)


class WaitingQueue:
    """One policy per priority class and tenant. A class with a lower number goes first, as a whole.

    No sequence passes the head, so a large request never starves, and no request of its priority or
    a lower one is admitted while a group is swapped out (P 4.5).
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
        """Add a preempted sequence before all new ones of its class."""
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
        """Return the rank of a new sequence or a running prompt; the smallest is served first. Not
        for preempted sequences."""
        served = self.tenants.served(sequence.request.tenant)
        return sequence.priority, served, self._ranks.rank(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """Pass over the new head for now: a running prompt goes first."""
        self._classes[sequence.priority].new[sequence.request.tenant].pass_over(sequence)

    def is_preempted(self, sequence: Sequence) -> bool:
        """Return whether this waiting sequence was preempted."""
        return sequence.arrival in self._classes[sequence.priority].preempted

    def waiting(self) -> list[Sequence]:
        """Return all sequences by class, preempted ones before new ones."""
        found: list[Sequence] = []
        for priority in sorted(self._classes):
            waits = self._classes[priority]
            found += [waits.preempted[arrival] for arrival in sorted(waits.preempted)]
            for policy in waits.new.values():
                found += policy.waiting()
        return found

    def _next_policy(self, waits: _Class) -> Policy:
        """Return the policy of the least served tenant."""
        return waits.new[waits.least.first(waits.new, self.tenants.served)]

    def _class_of(self, sequence: Sequence) -> _Class:
        found = self._classes.get(sequence.priority)
        if found is None:
            found = self._classes[sequence.priority] = _Class()
            heapq.heappush(self._priorities, sequence.priority)
        return found


class SchedulerProgress:
    """The `Progress` of a scheduler."""

    def __init__(self, rows: Rows, memory: Memory) -> None:
        self.num_planned_tokens = 0
        self._rows, self._memory = rows, memory

    def remaining(self, sequence: Sequence) -> int:
        """See Progress."""
        if sequence.row >= 0:
            table = self._rows.table
            return int(table.total[sequence.row] - table.computed[sequence.row])
        return sequence.num_known_tokens - self._memory.num_found_tokens(sequence)

    def num_tokens_under_way(self) -> int:
        """See Progress."""
        return int(self._rows.needs(self._rows.running).sum())
