"""Bookkeeping of the host tier: blocks evicted from the device and cached in host memory (A16, C7).

A plan copies evicted blocks to host memory before its forward pass. In the host pool such a block
has the same name, no references, and a position in the order of eviction. If a later prefix hit
includes blocks in host memory, the request's plan loads them. The host's copy stays, so evicting
the block again needs no copy.

Swapping (P 4.5) takes the host memory that it needs; the tier uses the rest. A plan swaps out,
loads and copies before its forward pass, and plans run one after the other. But stores write at any
time. So a host block that a plan reads or writes is held until the plan's result (`hold`).

The copies of a plan in flight are unsettled until its result. If the step fails, their contents may
be invalid (`forget_unsettled`).
"""

from collections import deque
from collections.abc import Sequence

from quire.kv.pool import BlockPool

Copies = tuple[list[int], list[int]]  # blocks to read, blocks to write
Name = tuple[int, bytes]  # cache group, digest
HostBlock = tuple[int, int]  # cache group, block


class HostTier:
    """Blocks of host memory that cache evicted blocks. limits: maximum number per cache group."""

    def __init__(
        self, device: Sequence[BlockPool], host: Sequence[BlockPool], limits: Sequence[int]
    ) -> None:
        self._device, self._host = tuple(device), tuple(host)
        self.limits = tuple(limits)
        self._held: list[HostBlock] = []  # held by the plan being made
        self._in_flight: deque[tuple[int, list[HostBlock]]] = deque()  # step, its plan's holds
        self._unsettled: deque[tuple[int, list[Name]]] = deque()  # step, names that its plan copies
        self._fresh: list[Name] = []  # names copied by the plan being made
        self.num_offloaded = 0
        self.num_loaded = 0
        for pool in device:
            pool.evicted = []

    def lookup(self, group: int, digest: bytes) -> int | None:
        """Return the host block of this name, or None, without taking a reference."""
        return self._host[group].lookup(digest)

    def hold(self, group: int, block_id: int) -> None:
        """Hold a host block until the result of the plan being made."""
        self._host[group].acquire(block_id)
        self._held.append((group, block_id))

    def evict_some(self) -> bool:
        """Evict cached blocks of the device, up to the tier's limit per group. Return whether there
        were any."""
        pairs = zip(self._device, self.limits, strict=True)
        return sum(pool.evict() for pool, n in pairs for _ in range(n)) > 0

    def take_evicted(self) -> list[Copies]:
        """Return the copies, by cache group, of blocks that the device evicted since the last call.
        A block is lost if all host blocks are in use."""
        return [self._take_evicted(g) for g in range(len(self._device))]

    def _take_evicted(self, group: int) -> Copies:
        copies: Copies = [], []
        pool = self._device[group]
        if pool.evicted:
            evicted, pool.evicted = pool.evicted, []
            for block_id, digest in evicted:
                self.copy_out(group, block_id, digest, copies, names_known=False)
        return copies

    def copy_out(
        self,
        group: int,
        block_id: int | None,
        digest: bytes,
        copies: Copies,
        names_known: bool = True,
    ) -> bool:
        """Copy a device block to host memory in the plan being made, unless host memory has it.

        Return False if host memory is full. The name is reported once the copy is settled. With
        names_known it is also reported if host memory has the block."""
        host = self._host[group]
        known = host.lookup(digest)
        if known is not None:
            self.hold(group, known)  # most recently used now
        else:
            found = self.allocate(group)
            if found is None:
                return False
            assert block_id is not None, "a block that is nowhere is copied"
            host.index(found, digest)
            self._held.append((group, found))  # reserved for this copy during the plan
            copies[0].append(block_id)
            copies[1].append(found)
            self.num_offloaded += 1
        if known is None or names_known:
            self._fresh.append((group, digest))
        return True

    @property
    def has_held(self) -> bool:
        """Whether the plan being made holds host blocks."""
        return len(self._held) > 0

    @property
    def num_unsettled(self) -> int:
        """The number of names that plans in flight will settle."""
        return sum(len(names) for _, names in self._unsettled)

    def allocate(self, group: int) -> int | None:
        """Return a host block within the tier's limit, or None if all are in use."""
        host = self._host[group]
        if host.num_indexed >= self.limits[group] and not host.evict():
            return None
        return host.allocate() if host.num_free else None

    def room(self, group: int) -> int:
        """Return how many blocks are free or may be evicted, within the tier's limit."""
        return self.limits[group] - self._host[group].num_used

    def keep_fetched(self, group: int, block_id: int, digest: bytes | None) -> None:
        """Name a host block that a store has filled, and release it. digest None frees it."""
        if digest is not None:
            self._host[group].index(block_id, digest)
        self._host[group].release(block_id)

    def borrow(self, group: int, digest: bytes) -> int | None:
        """Hold the host block of this name until `release`, and return it; None if there is
        none."""
        block_id = self._host[group].lookup(digest)
        if block_id is not None:
            self._host[group].acquire(block_id)
        return block_id

    def release(self, group: int, block_id: int) -> None:
        self._host[group].release(block_id)

    def held_blocks(self, group: int) -> list[int]:
        """Return the blocks that plans hold, once per hold."""
        everything = [self._held, *(held for _, held in self._in_flight)]
        return [block_id for held in everything for g, block_id in held if g == group]

    def end_plan(self, step_id: int) -> None:
        """Record that the plan is complete. Without a call, its moves count for the next plan."""
        if self._held:
            self._in_flight.append((step_id, self._held))
            self._held = []
        if self._fresh:
            self._unsettled.append((step_id, self._fresh))
            self._fresh = []

    def settle(self, step_id: int) -> list[Name]:
        """Settle the copies of a step's plan; return their names."""
        while self._in_flight and self._in_flight[0][0] <= step_id:
            for group, block_id in self._in_flight.popleft()[1]:
                self._host[group].release(block_id)
        if not self._unsettled or self._unsettled[0][0] > step_id:
            return []
        return self._unsettled.popleft()[1]

    def forget_unsettled(self) -> None:
        """Remove the names of all unsettled blocks."""
        names = self._fresh + [name for _, names in self._unsettled for name in names]
        self._fresh, self._unsettled = [], deque()
        self.forget(names)

    def forget(self, names: Sequence[Name]) -> None:
        for group, digest in names:
            self._host[group].forget(digest)

    def reset(self) -> None:
        """Remove all names."""
        for pool, host in zip(self._device, self._host, strict=True):
            host.reset_index()
            pool.evicted = []
        self._fresh, self._unsettled = [], deque()
