"""Waiting queue of the scheduler.

Order: priority classes; in a class the preempted sequences first, then the least served tenant; in
    a tenant the order of its policy. The default policy is first in, first out (T algorithm 1).
    Others are in `scheduler/policy`, and packages can provide one (docs/extend/policies.md).
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.tenants import ByServedTokens, Tenants

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
            if len(found.new) == 1:
                return next(iter(found.new.values())).peek()
            if found.new:
                return found.new[found.lowest.first(found.new, self.tenants.served)].peek()
            del self._classes[heapq.heappop(self._priorities)]
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or has ended."""
        found, name = self._classes[sequence.priority], sequence.request.tenant
        if found.preempted.pop(sequence.arrival, None) is None:
            found.new[name].remove(sequence)
            if not len(found.new[name]):
                del found.new[name]
                found.lowest.remove(name)
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
