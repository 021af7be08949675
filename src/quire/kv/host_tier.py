"""The host tier's book-keeping: blocks that the device evicted, kept in host memory (A16, C7).

A block that leaves the device's index to make room is copied to a host block before the plan's
forward pass, and stands in the host pool as it stood in the device's: named by its digest, with no
references, evicted when it was not used for longest. A later request whose digests go on where the
device's index ends gets device blocks into which its plan loads them. The host's copy stays, so
that evicting the block once more copies nothing.

Host memory is shared with swapping (P 4.5), which takes what it needs: the tier only has what is
free of it. Moves of a plan are carried out in the order swap out, load, copy, forward pass, one
plan after the other; but what stores bring is written whenever it comes. So a host block that a
plan reads or writes is not given away before the plan's result is there (`hold`).

What a plan in flight copies out counts as unsettled until its result came: if the step fails, what
it was to copy may never have been computed (`forget_unsettled`).
"""

from collections import deque
from collections.abc import Sequence

from quire.kv.pool import BlockPool

Copies = tuple[list[int], list[int]]  # blocks to read, blocks to write
Name = tuple[int, bytes]  # cache group, digest
HostBlock = tuple[int, int]  # cache group, block


class HostTier:
    """limits: most blocks of each cache group that the tier may fill."""

    def __init__(
        self, device: Sequence[BlockPool], host: Sequence[BlockPool], limits: Sequence[int]
    ) -> None:
        self._device, self._host = tuple(device), tuple(host)
        self.limits = tuple(limits)
        self._held: list[HostBlock] = []  # by the plan that is being made
        self._in_flight: deque[tuple[int, list[HostBlock]]] = deque()  # step, what its plan holds
        self._unsettled: deque[tuple[int, list[Name]]] = deque()  # step, what its plan copies out
        self._fresh: list[Name] = []  # copied out by the plan that is being made
        self.num_offloaded = 0
        self.num_loaded = 0
        for pool in device:
            pool.evicted = []

    def lookup(self, group: int, digest: bytes) -> int | None:
        """Return the host block that holds it, or None. Takes no reference."""
        return self._host[group].lookup(digest)

    def hold(self, group: int, block_id: int) -> None:
        """Keep a host block from being given away until the plan being made has its result."""
        self._host[group].acquire(block_id)
        self._held.append((group, block_id))

    def evict_some(self) -> bool:
        """Take what nobody holds out of the device's index, as much as host memory has room for;
        whether there was something."""
        found = [
            pool.evict()
            for pool, n in zip(self._device, self.limits, strict=True)
            for _ in range(n)
        ]
        return any(found)

    def take_evicted(self) -> list[Copies]:
        """Find host blocks for what the device's pools have evicted since the last call; returns
        the copies, by cache group. What finds none, because all host blocks are in use, is lost."""
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
        """Have the plan that is being made copy a block of the device, unless host memory has it.
        Its name is reported when that is settled; names_known: also if host memory has it. False if
        host memory has no room."""
        host = self._host[group]
        known = host.lookup(digest)
        if known is not None:
            self.hold(group, known)  # used again
        else:
            found = self.allocate(group)
            if found is None:
                return False
            assert block_id is not None, "a block that is nowhere is copied"
            host.index(found, digest)
            self._held.append((group, found))  # nothing else of this plan goes there
            copies[0].append(block_id)
            copies[1].append(found)
            self.num_offloaded += 1
        if known is None or names_known:
            self._fresh.append((group, digest))
        return True

    @property
    def has_held(self) -> bool:
        """Whether the plan being made holds host blocks, which its result gives back."""
        return len(self._held) > 0

    @property
    def num_unsettled(self) -> int:
        """Count the names that plans in flight will tell."""
        return sum(len(names) for _, names in self._unsettled)

    def allocate(self, group: int) -> int | None:
        """Take a host block within the tier's limit; None if all are in use."""
        host = self._host[group]
        if host.num_indexed >= self.limits[group] and not host.evict():
            return None
        return host.allocate() if host.num_free else None

    def keep_fetched(self, group: int, block_id: int, digest: bytes | None) -> None:
        """Give a host block back into which a store has fetched. digest: what the index is to call
        it; None if nobody wants it."""
        if digest is not None:
            self._host[group].index(block_id, digest)
        self._host[group].release(block_id)

    def borrow(self, group: int, digest: bytes) -> int | None:
        """Hold the host block of this name, for a store that copies it, until `release`; None if
        there is none."""
        block_id = self._host[group].lookup(digest)
        if block_id is not None:
            self._host[group].acquire(block_id)
        return block_id

    def release(self, group: int, block_id: int) -> None:
        self._host[group].release(block_id)

    def held_blocks(self, group: int) -> list[int]:
        """List the blocks that plans hold, with repetition."""
        everything = [self._held, *(held for _, held in self._in_flight)]
        return [block_id for held in everything for g, block_id in held if g == group]

    def end_plan(self, step_id: int) -> None:
        """Note that the plan is made. (If nothing is planned, what it moves is part of the next
        one.)"""
        if self._held:
            self._in_flight.append((step_id, self._held))
            self._held = []
        if self._fresh:
            self._unsettled.append((step_id, self._fresh))
            self._fresh = []

    def settle(self, step_id: int) -> list[Name]:
        """Take note of a step's result: returns the names of what its plan copied out, which is
        there now."""
        while self._in_flight and self._in_flight[0][0] <= step_id:
            for group, block_id in self._in_flight.popleft()[1]:
                self._host[group].release(block_id)
        if not self._unsettled or self._unsettled[0][0] > step_id:
            return []
        return self._unsettled.popleft()[1]

    def forget_unsettled(self) -> None:
        """Take away the names of all that plans in flight copy out."""
        names = self._fresh + [name for _, names in self._unsettled for name in names]
        self._fresh, self._unsettled = [], deque()
        self.forget(names)

    def forget(self, names: Sequence[Name]) -> None:
        for group, digest in names:
            self._host[group].forget(digest)

    def reset(self) -> None:
        """Forget every name."""
        for pool, host in zip(self._device, self._host, strict=True):
            host.reset_index()
            pool.evicted = []
        self._fresh, self._unsettled = [], deque()
