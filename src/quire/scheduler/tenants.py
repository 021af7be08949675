"""Tenants by the tokens that they were served, for the order of the waiting queue."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        if len(self._heap) > 2 * len(self._numbers) + 64:  # most entries are outdated
            self._heap = [each for each in self._heap if self._numbers.get(each[2]) == each[1]]
            heapq.heapify(self._heap)

    def remove(self, name: str) -> None:
        self._numbers.pop(name, None)

    def first(self, names: Collection[str], served: Callable[[str], int]) -> str:
        """Return the least served of `names`, which must all have been added."""
        while True:
            was, number, name = self._heap[0]
            if name not in names or self._numbers.get(name) != number:
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
            self._lowest.remove(name)
            self._absent[name] = None
            if len(self._absent) > MAX_ABSENT:
                removed, _ = self._absent.popitem(last=False)
                self._free_slots.append(self._tenants.pop(removed).slot)

    def charge(self, num_tokens: npt.NDArray[np.int64]) -> None:
        """Charge tenants for planned tokens. num_tokens: [S], by tenant slot."""
        served = self._served[: len(num_tokens)]
        served += num_tokens

    def _new_slot(self) -> int:
        if not self._free_slots:
            size = len(self._served)
            self._served = np.concatenate([self._served, np.zeros(size, np.int64)])
            self._free_slots = list(range(2 * size - 1, size - 1, -1))
        slot = self._free_slots.pop()
        self._served[slot] = 0
        return slot
