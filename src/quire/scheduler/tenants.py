"""Who has been served how much: virtual token counters (Sheng et al., *Fairness in Serving Large
Language Models*, OSDI 2024).

A tenant's counter grows by the tokens that are computed and sampled for it. Of those that wait, the
tenant with the smallest counter comes first, so a light one does not stand in a heavy one's queue.
Who comes back from a pause begins at the smallest counter of those that are there: nobody saves up
a claim by being away.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
