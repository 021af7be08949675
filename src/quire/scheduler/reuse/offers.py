"""Offers: blocks that stores receive as soon as they are computed, instead of at eviction.

    named in plan N -> computed by N -> copied to host memory by a later plan -> settled -> Keep

A plan copies before its forward pass, so the next plan copies the blocks named by this one. Such a
copy is treated like an evicted block (`kv/host_tier.py`): its name becomes valid with the result,
and is forgotten if the step fails. Blocks of all requests are offered, or only of requests that set
it (`Request.kv_transfer`). A block may be evicted before, or host memory may be full. Then the
block is stored at eviction or not at all, which is no error.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from quire.kv.host_tier import Copies, HostTier, Name
from quire.kv.manager import KVManager
from quire.scheduler.core.extension import CacheListener
from quire.scheduler.core.sequence import Sequence

MAX_WAITING = 1 << 14  # maximum number of offered names; beyond it, the oldest is dropped
MAX_KNOWN = 1 << 14  # maximum number of names known to be in stores


class Budget(Protocol):
    """Number of blocks that the plan being made may still copy."""

    @property
    def room(self) -> int: ...


class Offers(CacheListener):
    """Listener that offers newly named blocks. keeps_all: offer blocks of all requests."""

    def __init__(self, kv: KVManager, tier: HostTier, keeps_all: bool, budget: Budget) -> None:
        self._kv, self._tier, self._keeps_all = kv, tier, keeps_all
        self._waiting: OrderedDict[Name, None] = OrderedDict()
        # Names in stores. False: at least one store has it only until host memory loses it.
        self._known: OrderedDict[Name, bool] = OrderedDict()
        self._copying: set[Name] = set()  # offered blocks that plans in flight copy
        self._named: list[set[int]] = [set() for _ in kv.groups]  # by the plan being made
        self._budget = budget

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_copying(self) -> int:
        """Number of offered blocks that plans in flight copy to host memory."""
        return len(self._copying)

    def named(
        self, sequences: Seq[Sequence], firsts: Seq[int], counts: Seq[int], blocks: Seq[Any]
    ) -> None:
        """See CacheListener: queue the newly named blocks of requests with offers."""
        for by_group in blocks:
            for mine, found in zip(self._named, by_group, strict=True):
                mine.update(found)
        for sequence, count in zip(sequences, counts, strict=True):
            transfer = sequence.request.kv_transfer
            if self._keeps_all or (transfer is not None and transfer.keeps):
                self._offer(sequence.digests[sequence.num_offered : count])
                sequence.num_offered = max(sequence.num_offered, count)

    def _offer(self, digests: list[bytes]) -> None:
        for digest in digests:
            for g in range(len(self._kv.groups)):
                if not self._is_known(g, digest):
                    self._waiting[g, digest] = None
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def _is_known(self, group: int, digest: bytes) -> bool:
        known = self._known.get((group, digest))
        return known is True or (known is False and self._tier.lookup(group, digest) is not None)

    def copy_out(self, copies: list[Copies]) -> None:
        """See CacheListener: add the queued blocks to the plan's copies, as far as the budget
        allows."""
        if not (self._tier.num_unsettled or self._tier.has_held):
            self._copying.clear()  # the rest belongs to steps that failed
        if not self._waiting or (num_allowed := self._budget.room) <= 0:
            return
        for g, digest in list(self._waiting):
            block = self._kv.device_block(g, digest)
            is_on_host = self._tier.lookup(g, digest) is not None
            if block in self._named[g] and not is_on_host:
                continue  # this plan computes it
            if block is not None or is_on_host:
                if not self._tier.copy_out(g, block, digest, copies[g]):
                    return  # host memory is full
                self._copying.add((g, digest))
                num_allowed -= 1
            del self._waiting[g, digest]
            if num_allowed <= 0:
                return

    def end_plan(self, now: float) -> None:
        """Note the end of planning: later plans can copy the blocks that this plan named."""
        for named in self._named:
            named.clear()

    def take_copied(self, names: Iterable[Name]) -> set[Name]:
        """Return the offered ones of these names, whose copies are settled."""
        copied = self._copying.intersection(names)
        self._copying -= copied
        return copied

    def take_kept(self, names: Iterable[Name], is_lasting: bool) -> None:
        """Record the names that a store has now. is_lasting: the store keeps them even after host
        memory loses them."""
        for name in names:
            self._known[name] = is_lasting and self._known.get(name, True)
            self._known.move_to_end(name)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self, names: Iterable[Name]) -> None:
        """Forget names that stores should no longer have."""
        for name in names:
            self._known.pop(name, None)
            self._waiting.pop(name, None)
            self._copying.discard(name)

    def drop_waiting(self) -> None:
        """Drop the queued names, if no room for their copies is expected."""
        self._waiting.clear()

    def reset(self, now: float) -> None:
        """Forget all names."""
        self._waiting.clear()
        self._known.clear()
        self._copying.clear()
