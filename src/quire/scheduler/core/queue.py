"""Waiting queue of the scheduler.

Order: priority classes; in a class the preempted sequences first, then the least served tenant; in
    a tenant the order of its policy. The default policy is first in, first out (T algorithm 1).
    Others are in `scheduler/policy`, and packages can provide one (docs/extend/policies.md).
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

# A request is due when PATIENCE times the tokens ahead of it have been planned.
PATIENCE = 1.8


class Progress(Protocol):
    """Scheduler state that a policy may read."""

    num_planned_tokens: int  # tokens planned so far, the scheduler's own clock

    def remaining(self, sequence: Sequence) -> int:
        """Return the number of tokens to compute before a sequence samples, without its current
        hit."""
        ...

    def num_tokens_under_way(self) -> int:
        """Return the number of tokens that all running sequences still compute before they
        sample."""
        ...


class Policy(Protocol):
    """Queue of sequences that have not run yet, all of one priority and tenant."""

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        ...

    def peek(self) -> Sequence | None:
        """Return the sequence to admit next, or None."""
        ...

    def pass_over(self, sequence: Sequence) -> None:
        """Note that a running prompt goes before the head of the queue this time."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        ...

    def rank(self, sequence: Sequence) -> int:
        """Return the rank of the head, or of a running prompt. When both compete for the tokens of
        a step, the smaller rank is served first."""
        ...

    def waiting(self) -> list[Sequence]:
        """Return all sequences for observers, in the likely order of admission. Do not call
        `remaining`: it names blocks, so a watched run would differ from an unwatched one."""
        ...

    def __len__(self) -> int: ...


MakePolicy = Callable[[Progress], Policy]


class Fifo:
    """Policy in order of arrival."""

    def __init__(self, progress: Progress) -> None:
        self._queue: dict[int, Sequence] = {}  # by arrival, which is also the insertion order

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


MAX_ABSENT = 4096  # maximum number of tenants without requests whose counters are retained


@dataclass(slots=True)
class Tenant:
    """Counters of one tenant. slot: index in the counter array. num_requests: unfinished
    requests."""

    slot: int
    num_requests: int = 0


class ByServedTokens:
    """Priority queue of tenants by tokens served; equally served tenants keep the order of adding.

    Served counts only grow, so a heap entry is never too large. An outdated entry is corrected when
    it reaches the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._numbers: dict[str, int] = {}  # by name: number of the current heap entry
        self._num_added = 0

    def add(self, name: str, served: int) -> None:
        self._numbers[name] = self._num_added
        heapq.heappush(self._heap, (served, self._num_added, name))
        self._num_added += 1

    def first(self, names: Collection[str], served: Callable[[str], int]) -> str:
        """Return the least served of `names`, which must all have been added. Forget other
        names."""
        if len(self._heap) > 2 * len(names) + 64:  # many names have been removed or added again
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
    """Served tokens of all tenants with requests, and of the tenants that ended last.

    At most MAX_ABSENT tenants without requests are retained.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()  # without requests, oldest first
        self._present: set[str] = set()
        self._lowest = ByServedTokens()
        self._served = np.zeros(16, np.int64)
        self._free_slots = list(range(15, -1, -1))

    def served(self, name: str) -> int:
        """Return the number of tokens that this tenant was served."""
        return int(self._served[self._tenants[name].slot])

    def enter(self, name: str) -> int:
        """Count a new request of this tenant. Return the tenant's slot."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._new_slot())
        if tenant.num_requests == 0:
            self._absent.pop(name, None)
            if self._present:
                lowest = self.served(self._lowest.first(self._present, self.served))
                # One less, so that a returning tenant goes before equally served ones.
                self._served[tenant.slot] = max(self._served[tenant.slot], lowest - 1)
            self._present.add(name)
            self._lowest.add(name, self.served(name))
        tenant.num_requests += 1
        return tenant.slot

    def leave(self, name: str) -> None:
        """Count the end of a request of this tenant."""
        tenant = self._tenants[name]
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            self._present.remove(name)
            self._absent[name] = None
            if len(self._absent) > MAX_ABSENT:
                removed, _ = self._absent.popitem(last=False)
                self._free_slots.append(self._tenants.pop(removed).slot)

    def charge(self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int32]) -> None:
        """Charge tenants for planned tokens. slots, num_tokens: [N] tenant slot and tokens of each
        row."""
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
    """Waiting sequences of one priority. preempted: by arrival. new: non-empty policies by
    tenant."""

    preempted: dict[int, Sequence] = field(default_factory=dict)
    new: dict[str, Policy] = field(default_factory=dict)
    lowest: ByServedTokens = field(default_factory=ByServedTokens)


class WaitingQueue:
    """Queue with one policy per priority class and tenant. A lower class number is served first.

    No sequence passes the head, so a large request never starves. While a group is swapped out, no
    request of its priority or a lower one is admitted (P 4.5).
    """

    def __init__(self, make_policy: MakePolicy, progress: Progress) -> None:
        self.tenants = Tenants()
        self._make_policy = make_policy
        self._progress = progress
        self._ranks = make_policy(progress)  # ranks running sequences
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # heap; may list empty classes
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def push(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        waits, name = self._class_of(sequence), sequence.request.tenant
        if name not in waits.new:
            waits.new[name] = self._make_policy(self._progress)
            waits.lowest.add(name, self.tenants.served(name))
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
        """Return the rank of a new sequence or a running prompt: priority, served tokens, policy
        rank. The smallest rank is served first. Preempted sequences have no rank."""
        served = self.tenants.served(sequence.request.tenant)
        return sequence.priority, served, self._ranks.rank(sequence)

    def pass_over(self, sequence: Sequence) -> None:
        """Note that a running prompt goes before the queue's head this time."""
        self._classes[sequence.priority].new[sequence.request.tenant].pass_over(sequence)

    def is_preempted(self, sequence: Sequence) -> bool:
        """Return whether this waiting sequence was preempted before."""
        return sequence.arrival in self._classes[sequence.priority].preempted

    def waiting(self) -> list[Sequence]:
        """Return all waiting sequences by class, preempted sequences before new ones."""
        found: list[Sequence] = []
        for priority in sorted(self._classes):
            waits = self._classes[priority]
            found += [waits.preempted[arrival] for arrival in sorted(waits.preempted)]
            for policy in waits.new.values():
                found += policy.waiting()
        return found

    def _next_policy(self, waits: _Class) -> Policy:
        """Return the policy of the least served tenant in a class."""
        return waits.new[waits.lowest.first(waits.new, self.tenants.served)]

    def _class_of(self, sequence: Sequence) -> _Class:
        found = self._classes.get(sequence.priority)
        if found is None:
            found = self._classes[sequence.priority] = _Class()
            heapq.heappush(self._priorities, sequence.priority)
        return found


class SchedulerProgress:
    """`Progress` of a scheduler, computed from its rows and memory."""

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
