"""A directory of KV blocks in virtual time: what is kept in it, and when reads and writes end.

Transfers run one after the other at a fixed rate, as on the thread of a real store. Beyond its
limit, the store deletes the least recently used blocks.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from quire.base.clock import Clock
from quire.base.kv_orders import (
    Answer,
    BlockName,
    Fetch,
    Fetched,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Removed,
)
from quire.tools.simulate.handover import Link, Offered


class Contents:
    """Blocks in a directory that all replicas share. block_bytes: by cache group."""

    def __init__(self, block_bytes: Sequence[int], max_bytes: float) -> None:
        self.block_bytes, self._max_bytes = block_bytes, max_bytes
        self.names: OrderedDict[BlockName, None] = OrderedDict()
        self._num_bytes = 0

    def add(self, name: BlockName) -> None:
        """Keep a block, and delete old ones if there is no room."""
        if name not in self.names:
            self._num_bytes += self.block_bytes[name[0]]
            self.names[name] = None
        self.use(name)
        while self._num_bytes > self._max_bytes:
            (group, _), _ = self.names.popitem(last=False)
            self._num_bytes -= self.block_bytes[group]

    def use(self, name: BlockName) -> bool:
        """Note that a block is used. Return whether it is there."""
        if name not in self.names:
            return False
        self.names.move_to_end(name)
        return True

    def remove(self, name: BlockName) -> None:
        """Delete a block, if it is there."""
        if name in self.names:
            del self.names[name]
            self._num_bytes -= self.block_bytes[name[0]]


class VirtualDisk(Link):
    """A replica's access to the directory. bytes_per_s: rate of reads and writes together."""

    def __init__(self, contents: Contents, bytes_per_s: float, clock: Clock) -> None:
        super().__init__(Offered(0, 0), contents.block_bytes, bytes_per_s, clock)
        self._contents = contents

    def _answer(self, order: Order) -> tuple[float, Answer]:
        """Return the time of an answer, and the answer. A look-up waits for no transfer."""
        now, contents = self._clock.now(), self._contents
        if isinstance(order, LookUp):
            found = [name in contents.names for name in order.names]
            return now, LookedUp(order.store, order.request_id, found, order.ticket)
        if isinstance(order, Fetch):
            ok = [contents.use((group, digest)) for group, digest, _ in order.items]
            num_bytes, duration_s = self._transfer(
                [each for each, is_there in zip(order.items, ok, strict=True) if is_there]
            )
            return self._free_s, Fetched(order.store, order.ticket, ok, num_bytes, duration_s)
        if isinstance(order, Keep):
            new = [each for each in order.items if each[:2] not in contents.names]
            num_bytes, duration_s = self._transfer(new)
            for group, digest, _ in order.items:
                contents.add((group, digest))
            ok = [True] * len(order.items)
            return self._free_s, Kept(order.store, order.ticket, ok, num_bytes, duration_s)
        for name in order.names:
            contents.remove(name)
        return now, Removed(order.store, order.ticket, [True] * len(order.names))

    def _transfer(self, items: Sequence[tuple[int, bytes, int]]) -> tuple[int, float]:
        """Take the time of a transfer, after all earlier ones. Return its bytes and seconds."""
        num_bytes = sum(self._block_bytes[group] for group, _, _ in items)
        duration_s = num_bytes / self._bytes_per_s
        self._free_s = max(self._clock.now(), self._free_s, -math.inf) + duration_s
        self.num_bytes += num_bytes
        return num_bytes, duration_s
