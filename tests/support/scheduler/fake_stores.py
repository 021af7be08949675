"""Stores for tests of the scheduler: they keep blocks as ordered, and answer on request."""

import zlib
from collections.abc import Iterable

import numpy as np

from quire.base.kv_orders import (
    Answer,
    Fetch,
    Fetched,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Remove,
    Removed,
)
from quire.kv.digest import Mark
from quire.scheduler.scheduler import Scheduler
from tests.support.scheduler.fake_device import GARBAGE

BLOCK = 4


def content(tokens: np.ndarray, marks: Iterable[Mark]) -> int:
    """Return the content of a device's slot for the last of these tokens."""
    before = b"".join(data for index, data in marks if index < len(tokens))
    return zlib.crc32(tokens.tobytes(), zlib.crc32(before))


class FakeStores:
    """Blocks of tokens by name, next to the device's host memory. has_others: other engines have
    stored most blocks that are looked up. old: names that must not be looked up any more."""

    def __init__(self, num: int, scheduler: Scheduler) -> None:
        self.kept: list[dict[tuple[int, bytes], np.ndarray]] = [{} for _ in range(num)]
        self.scheduler = scheduler
        self.pending: list[Order] = []
        self.host: list[np.ndarray] = []
        self.has_others = False
        self.old: set[tuple[int, bytes]] = set()

    has_answers = False
    next_s = None
    num_open = 0

    def take(self, now: float, waits: bool) -> list[Answer]:
        return []

    def submit(self, orders: list[Order]) -> None:
        """Take orders. A removal overtakes all others, and cancels writes of its blocks."""
        for order in orders:
            self.pending.append(order)
            if isinstance(order, LookUp):
                assert self.old.isdisjoint(order.names), "a name from before a reset"
                self._put_others(order)
            elif isinstance(order, Remove):
                for name in order.names:
                    self.kept[order.store].pop(name, None)
                for i, other in enumerate(self.pending):
                    if isinstance(other, Keep) and other.store == order.store:
                        items = [
                            (g, d, -1 if (g, d) in order.names else b) for g, d, b in other.items
                        ]
                        self.pending[i] = Keep(other.store, other.ticket, tuple(items))

    def _put_others(self, order: LookUp) -> None:
        sequence = self.scheduler.lifecycle.sequences.get(order.request_id)
        if not self.has_others or sequence is None:
            return
        tokens = sequence.known_tokens.astype(np.int32)
        for i, digest in enumerate(sequence.digests):
            for g in range(len(self.host)):
                if digest[0] % 8 and (g, digest) in order.names:
                    ends = range(i * BLOCK + 1, (i + 1) * BLOCK + 1)
                    block = np.array([content(tokens[:end], sequence.marks) for end in ends])
                    self.kept[order.store][g, digest] = block

    def answer(self, pick: int, fails: bool) -> Answer | None:
        if not self.pending:
            return None
        order = self.pending.pop(pick % len(self.pending))
        kept = self.kept[order.store]
        if isinstance(order, LookUp):
            found = [name in kept and not fails for name in order.names]
            return LookedUp(order.store, order.request_id, found, order.ticket)
        if isinstance(order, Remove):
            return Removed(order.store, order.ticket, [not fails] * len(order.names))
        ok = [not fails or i % 2 == 0 for i in range(len(order.items))]
        if isinstance(order, Fetch):
            ok = [good and item[:2] in kept for good, item in zip(ok, order.items, strict=True)]
            for g, digest, block in order.items:
                self.host[g][block] = kept.get((g, digest), GARBAGE)  # also for missing blocks
            return Fetched(order.store, order.ticket, ok, 10 * sum(ok), 0.001)
        for (g, digest, block), good in zip(order.items, ok, strict=True):
            if good and block >= 0:
                kept[g, digest] = self.host[g][block].copy()
        return Kept(order.store, order.ticket, ok, 10 * sum(ok), 0.001)
