"""A directory of KV blocks in virtual time: what is kept in it, and when reads and writes end.

Transfers of all replicas run one after the other at a fixed rate. A block can be looked up when its
write has ended. Beyond its limit, the store deletes the least recently used blocks.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

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
    """Blocks in a directory that all replicas share. block_bytes: by cache group. free_s: time at
    which all ordered transfers of all replicas have ended."""

    def __init__(self, block_bytes: Sequence[int], max_bytes: float) -> None:
        self.block_bytes, self._max_bytes = block_bytes, max_bytes
        self.free_s = -math.inf
        self.names: OrderedDict[BlockName, None] = OrderedDict()
        self._writing: dict[BlockName, float] = {}  # times of writes' ends, in ascending order
        self._num_bytes = 0

    def transfer(self, duration_s: float, now: float) -> None:
        """Take the time of a transfer, after all earlier ones."""
        self.free_s = max(now, self.free_s) + duration_s

    def write(self, name: BlockName) -> None:
        """Keep a block from the end of the last transfer on."""
        self._writing[name] = self.free_s

    def end_writes(self, now: float) -> None:
        """Keep the blocks whose writes have ended."""
        ended = takewhile(lambda item: item[1] <= now, self._writing.items())
        for name in [name for name, _ in ended]:
            del self._writing[name]
            self.add(name)

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
        """Note that a block is used. Return whether it is there at the end of all transfers."""
        if name in self.names:
            self.names.move_to_end(name)
        return name in self.names or name in self._writing

    def remove(self, name: BlockName) -> None:
        """Delete a block, if it is there."""
        self._writing.pop(name, None)
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
        contents.end_writes(now)
        if isinstance(order, LookUp):
            found = [name in contents.names for name in order.names]
            return now, LookedUp(order.store, order.request_id, found, order.ticket)
        if isinstance(order, Fetch):
            ok = [contents.use((group, digest)) for group, digest, _ in order.items]
            there = zip(order.items, ok, strict=True)
            num_bytes = sum(self._transfer(item[0]) for item, is_there in there if is_there)
            duration_s = num_bytes / self._bytes_per_s
            answer = Fetched(order.store, order.ticket, ok, num_bytes, duration_s)
            return max(now, contents.free_s), answer
        if isinstance(order, Keep):
            num_bytes = 0
            for group, digest, _ in order.items:
                if not contents.use((group, digest)):
                    num_bytes += self._transfer(group)
                    contents.write((group, digest))
            ok, duration_s = [True] * len(order.items), num_bytes / self._bytes_per_s
            kept = Kept(order.store, order.ticket, ok, num_bytes, duration_s)
            return max(now, contents.free_s), kept
        for name in order.names:
            contents.remove(name)
        return now, Removed(order.store, order.ticket, [True] * len(order.names))

    def _transfer(self, group: int) -> int:
        """Take the time of a block's transfer. Return its bytes."""
        num_bytes = self._block_bytes[group]
        self._contents.transfer(num_bytes / self._bytes_per_s, self._clock.now())
        self.num_bytes += num_bytes
        return num_bytes
