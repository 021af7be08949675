"""Index of the host-tier blocks that peers may read: their names and locations.

    core's thread    add, remove                    reuses host blocks when it needs them
    peers' threads   copy the block -> does it still have its name? -> send it; else it is a miss

No block is held for a peer. A host block is written only after it has lost its name, and each loss
is counted before. If the count is unchanged after a copy, the copy is intact.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.base.kv_orders import BlockName, Item
from quire.engine.connectors.store import Buffer, block_key, seal, split_key
from quire.engine.connectors.worker import HostMemory


class HostPool(Protocol):
    """Host blocks of one cache group (kv/pool.py)."""

    def digest_of(self, block_id: int) -> bytes | None: ...
    def num_names_lost(self, block_id: int) -> int: ...


@dataclass(frozen=True, slots=True)
class BlockLocation:
    """Location of a host block, and how many names it had lost before it got its current one."""

    group: int
    block: int
    num_lost: int


class HostIndex:
    """Names and locations of readable host blocks. pools: by cache group."""

    def __init__(self, fingerprint: bytes, memory: HostMemory, pools: Sequence[HostPool]) -> None:
        self._fingerprint, self._memory, self._pools = fingerprint, memory, pools
        self._locations: dict[bytes, BlockLocation] = {}
        self._keys: dict[tuple[int, int], bytes] = {}  # by group and block, to bound the index
        self._lock = threading.Lock()  # guards both

    def add(self, item: Item) -> tuple[bool, int]:
        """Make a complete block readable, on the core's thread, while the core holds it. Return
        whether it still has this name, and its size in bytes if it is new."""
        group, digest, block = item
        if self._pools[group].digest_of(block) != digest:
            return False, 0
        key = block_key(self._fingerprint, group, digest)
        location = BlockLocation(group, block, self._pools[group].num_names_lost(block))
        with self._lock:
            if self._locations.get(key) == location:
                return True, 0
            self._drop(self._keys.get((group, block)))
            self._drop(key)
            self._locations[key], self._keys[group, block] = location, key
        return True, self._memory.block_bytes(group)

    def remove(self, names: Iterable[BlockName]) -> None:
        self.remove_keys([block_key(self._fingerprint, *name) for name in names])

    def remove_keys(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: bytes | None) -> None:
        location = None if key is None else self._locations.pop(key, None)
        if location is not None:
            del self._keys[location.group, location.block]

    def find(self, keys: Iterable[bytes]) -> list[bool]:
        return [self.location(key) is not None for key in keys]

    def location(self, key: bytes) -> BlockLocation | None:
        """Return a block's location; None if it no longer has this name."""
        with self._lock:
            location = self._locations.get(key)
        return location if location is not None and self._is_there(location) else None

    def _is_there(self, location: BlockLocation) -> bool:
        return self._pools[location.group].num_names_lost(location.block) == location.num_lost

    def read(self, key: bytes) -> tuple[bytes, Buffer] | None:
        """Return a block's envelope, as header and data; None if it was reused."""
        location = self.location(key)
        if location is None:
            return None
        data = self._memory.read(location.group, location.block)
        if not self._is_there(location):
            return None
        return seal(*split_key(key), data), data
