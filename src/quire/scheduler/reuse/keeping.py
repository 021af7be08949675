"""Blocks on their way from host memory to stores.

    host block settles -> waits for room -> Keep -> Kept
                          |________________________|  host memory cannot evict it

Each store has at most MAX_KEEP_BLOCKS in flight, because its worker refuses orders beyond its
limit. Further blocks wait. To lose a block that no store has costs its computation; to lose a block
that a store has costs only a fetch. So blocks that wait are held, and host memory evicts others
first. At most a share of host memory is held in this way; beyond it, blocks are not kept.

The way back is similar. A request waits in the queue with blocks of its prefix in host memory, and
others evict these. While it looks the lost ones up, it would lose more. So a request that has lost
blocks once holds the others, and what it fetches, until it gets a row (`HostHolds`).
"""

from collections import deque
from collections.abc import Collection, Iterable

from quire.base.kv_orders import Item, Keep, Order
from quire.kv.host_tier import HostBlock, HostTier, Name

MAX_KEEP_BLOCKS = 256  # blocks in flight to one store
MAX_KEEP_BYTES = 128 << 20  # bytes in flight to one store; at least one block
WAITING_SHARE = 4  # waiting requests hold at most 1/WAITING_SHARE of it
HELD_SHARE = 2  # waiting blocks hold at most 1/HELD_SHARE of a cache group's host memory


class Tickets:
    """Source of unique tickets for orders."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class Keeping:
    """Blocks that stores are to keep. orders: list for new orders. max_blocks: maximum number of
    blocks in flight to a store."""

    def __init__(
        self,
        tier: HostTier,
        orders: list[Order],
        num_stores: int,
        block_bytes: Collection[int],
        tickets: Tickets,
    ) -> None:
        self.max_blocks = min(MAX_KEEP_BLOCKS, max(1, MAX_KEEP_BYTES // max([1, *block_bytes])))
        self._tier, self._orders, self._tickets = tier, orders, tickets
        self._max_waiting = [limit // (HELD_SHARE * num_stores) for limit in tier.limits]
        self._in_flight: dict[int, tuple[Item, ...]] = {}  # by ticket
        self._num_in_flight = [0] * num_stores
        self._waiting: list[deque[Item]] = [deque() for _ in range(num_stores)]
        self._num_waiting = [[0] * len(tier.limits) for _ in range(num_stores)]  # by cache group

    @property
    def backlog(self) -> int:
        """Number of blocks in flight or waiting for the store with the longest backlog."""
        pairs = zip(self._num_in_flight, self._waiting, strict=True)
        return max(num + len(waiting) for num, waiting in pairs)

    def held_blocks(self, group: int) -> list[int]:
        """Return the host blocks that are held, once per hold."""
        items = [*self._in_flight.values(), *self._waiting]
        return [block for each in items for g, _, block in each if g == group]

    def keep(self, names: Collection[Name], max_blocks: int | None = None) -> None:
        """Let all stores keep these blocks. max_blocks: maximum number in flight instead of the
        usual one."""
        num_allowed = max_blocks or self.max_blocks
        for store, waiting in enumerate(self._waiting):
            room = max(0, num_allowed - self._num_in_flight[store] - len(waiting))
            counts = self._num_waiting[store]
            for g, digest in names:
                if counts[g] >= room + self._max_waiting[g]:
                    continue
                block = self._tier.borrow(g, digest)
                if block is not None:
                    waiting.append((g, digest, block))
                    counts[g] += 1
            self._order(store, num_allowed)

    def take(self, store: int, ticket: int) -> tuple[Item, ...]:
        """Take the answer to an order: let its blocks go and order further ones. Return its
        items."""
        items = self._in_flight.pop(ticket, ())
        self._num_in_flight[store] -= len(items)
        for g, _, block in items:
            self._tier.release(g, block)
        if items:
            self._order(store, self.max_blocks)
        return items

    def _order(self, store: int, max_blocks: int) -> None:
        """Order waiting blocks up to the limit. Blocks that have lost their name meanwhile, after a
        reset or an error, are let go."""
        waiting, items = self._waiting[store], list[Item]()
        while waiting and self._num_in_flight[store] + len(items) < max_blocks:
            g, digest, block = waiting.popleft()
            self._num_waiting[store][g] -= 1
            if self._tier.lookup(g, digest) == block:
                items.append((g, digest, block))
            else:
                self._tier.release(g, block)
        if items:
            ticket = self._tickets.next()
            self._in_flight[ticket] = tuple(items)
            self._num_in_flight[store] += len(items)
            self._orders.append(Keep(store, ticket, tuple(items)))


class HostHolds:
    """Host blocks held for requests, by request id."""

    def __init__(self, tier: HostTier) -> None:
        self._tier = tier
        self._left = [limit // WAITING_SHARE for limit in tier.limits]  # blocks that may be held
        self._held: dict[str, list[HostBlock]] = {}

    def hold(self, request_id: str, names: Iterable[Name]) -> None:
        """Hold the blocks of these names that are in host memory, instead of the ones held so
        far."""
        self.release(request_id)
        found: list[HostBlock] = []
        for g, digest in names:
            block = self._tier.borrow(g, digest) if self._left[g] else None
            if block is not None:
                self._left[g] -= 1
                found.append((g, block))
        if found:
            self._held[request_id] = found

    def release(self, request_id: str) -> None:
        """Let the blocks of a request go."""
        for g, block in self._held.pop(request_id, ()):
            self._left[g] += 1
            self._tier.release(g, block)

    def release_all(self) -> None:
        """Let the blocks of all requests go."""
        for request_id in list(self._held):
            self.release(request_id)

    def held_blocks(self, group: int) -> list[int]:
        """Return the held blocks of a cache group, once per hold."""
        return [block for held in self._held.values() for g, block in held if g == group]
