"""Who has been served how much: virtual token counters (Sheng et al., *Fairness in Serving Large
Language Models*, OSDI 2024).

A tenant's counter grows by the tokens that are computed and sampled for it. Of those that wait, the
tenant with the smallest counter comes first, so a light one does not stand in a heavy one's queue.
Who comes back from a pause begins at the smallest counter of those that are there: nobody saves up
a claim by being away.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Tenant:
    """slot: its place among the counters. num_requests: unfinished ones."""

    slot: int
    num_requests: int = 0


class Tenants:
    """The counters of all tenants that have a request, and of others as long as they matter."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._served = np.zeros(16, np.int64)
        self._free_slots = list(range(15, -1, -1))
        self._num_present = 0

    def served(self, name: str) -> tuple[int, int]:
        """Its counter, in tokens, and its unfinished requests; the smallest comes first."""
        tenant = self._tenants[name]
        return int(self._served[tenant.slot]), tenant.num_requests

    def enter(self, name: str) -> int:
        """A request of this tenant has come; returns the tenant's slot."""
        if self._num_present == 0:
            self._start_anew()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(self._new_slot())
        if tenant.num_requests == 0:
            served = self._served[tenant.slot]
            self._served[tenant.slot] = max(served, self._least(default=served))
            self._num_present += 1
        tenant.num_requests += 1
        return tenant.slot

    def leave(self, name: str) -> None:
        """A request of this tenant has ended."""
        tenant = self._tenants[name]
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            self._num_present -= 1

    def charge(self, slots: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int32]) -> None:
        """Tokens were planned for rows of these tenants. Both [N]."""
        if len(self._tenants) == 1:
            self._served[slots[0]] += num_tokens.sum()
        else:
            np.add.at(self._served, slots, num_tokens)

    def _least(self, default: int = 0) -> int:
        """The smallest counter of those that are there."""
        present = (t for t in self._tenants.values() if t.num_requests)
        return min((int(self._served[tenant.slot]) for tenant in present), default=default)

    def _start_anew(self) -> None:
        """Nobody is there: only differences between those that are matter."""
        self._tenants.clear()
        self._served[:] = 0
        self._free_slots = list(range(len(self._served) - 1, -1, -1))

    def _new_slot(self) -> int:
        if not self._free_slots:
            self._forget_absent()
        if not self._free_slots:
            size = len(self._served)
            self._served = np.concatenate([self._served, np.zeros(size, np.int64)])
            self._free_slots = list(range(2 * size - 1, size - 1, -1))
        slot = self._free_slots.pop()
        self._served[slot] = 0
        return slot

    def _forget_absent(self) -> None:
        """Drop those without a request whose counter would be raised if they came back."""
        least = self._least()
        for name, tenant in list(self._tenants.items()):
            if tenant.num_requests == 0 and self._served[tenant.slot] <= least:
                del self._tenants[name]
                self._free_slots.append(tenant.slot)
