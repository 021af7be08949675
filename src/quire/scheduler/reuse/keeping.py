"""Blocks on their way from host memory to stores.

    host block settles -> waits for room -> Keep -> Kept
                          |________________________|  host memory cannot evict it

Each store has at most MAX_KEEP_BLOCKS in flight, because its worker refuses orders beyond its
limit. Further blocks wait. Losing a block that no store has costs its computation; losing a block
that a store has costs only a fetch. So blocks that wait are held, and host memory evicts others
first. At most a share of host memory is held in this way; beyond it, blocks are not kept.

Another engine may wait for offered blocks (`offers.py`), but not for evicted ones. So offered
blocks are ordered before all evicted ones, and take their place if too many wait.

The way back is similar. A request waits in the queue with blocks of its prefix in host memory, and
others evict these. While it looks the lost ones up, it would lose more. So a request that has lost
blocks once holds the others, and what it fetches, until it gets a row (`HostHolds`).
"""

from collections import deque
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from quire.base.kv_orders import Item, Keep, Order
from quire.kv.host_tier import HostBlock, HostTier, Name

MAX_KEEP_BLOCKS = 256  # blocks in flight to one store
MAX_KEEP_BYTES = 128 << 20  # bytes in flight to one store; at least one block
HELD_SHARE = 2  # waiting blocks hold at most 1/HELD_SHARE of a cache group's host memory
WAITING_SHARE = 4  # waiting requests hold at most 1/WAITING_SHARE of a cache group's host memory


class Tickets:
    """Source of unique tickets for orders. last: the latest ticket."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


@dataclass(slots=True)
class Backlog:
    """Blocks that one store is to keep. offered, evicted: waiting blocks, of which `num_waiting`
    counts each cache group. num_offered: offered blocks in flight or waiting."""

    num_waiting: list[int]
    num_in_flight: int = 0
    num_offered: int = 0
    offered: deque[Item] = field(default_factory=deque)
    evicted: deque[Item] = field(default_factory=deque)

    def __len__(self) -> int:
        """Return the number of blocks in flight or waiting."""
        return self.num_in_flight + len(self.offered) + len(self.evicted)

    def add(self, item: Item, is_offered: bool) -> None:
        """Let a block wait."""
        (self.offered if is_offered else self.evicted).append(item)
        self.num_waiting[item[0]] += 1
        self.num_offered += is_offered

    def next(self) -> tuple[Item, bool]:
        """Take the first waiting block. Return it, and whether it was offered."""
        is_offered = bool(self.offered)
        item = (self.offered if is_offered else self.evicted).popleft()
        self.num_waiting[item[0]] -= 1
        return item, is_offered

    def give_up(self, group: int) -> Item | None:
        """Take the newest evicted block of a cache group; None if none waits."""
        for i in range(len(self.evicted) - 1, -1, -1):
            if self.evicted[i][0] == group:
                item = self.evicted[i]
                del self.evicted[i]
                self.num_waiting[group] -= 1
                return item
        return None


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
        # By ticket: blocks, number of offered ones
        self._in_flight: dict[int, tuple[tuple[Item, ...], int]] = {}
        self._backlogs = [Backlog([0] * len(tier.limits)) for _ in range(num_stores)]

    @property
    def backlog(self) -> int:
        """Number of blocks in flight or waiting for the store with the longest backlog."""
        return max(map(len, self._backlogs))

    @property
    def num_offered(self) -> int:
        """Maximum over the stores of the number of offered blocks in flight or waiting."""
        return max(backlog.num_offered for backlog in self._backlogs)

    def held_blocks(self, group: int) -> list[int]:
        """Return the host blocks that are held, once per hold."""
        found: list[Collection[Item]] = [items for items, _ in self._in_flight.values()]
        for backlog in self._backlogs:
            found += [backlog.offered, backlog.evicted]
        return [block for items in found for g, _, block in items if g == group]

    def keep(
        self,
        names: Collection[Name],
        max_blocks: int | None = None,
        offered: Container[Name] = (),
    ) -> None:
        """Let all stores keep these blocks. max_blocks: maximum number in flight instead of the
        usual one. offered: the names that were offered."""
        num_allowed = max_blocks or self.max_blocks
        for store, backlog in enumerate(self._backlogs):
            room = max(0, num_allowed - len(backlog))
            for name in names:
                g, is_offered = name[0], name in offered
                if backlog.num_waiting[g] >= room + self._max_waiting[g]:
                    given_up = backlog.give_up(g) if is_offered else None
                    if given_up is None:
                        continue
                    self._tier.release(g, given_up[2])
                block = self._tier.borrow(*name)
                if block is not None:
                    backlog.add((*name, block), is_offered)
            self._order(store, num_allowed)

    def take(self, store: int, ticket: int) -> tuple[Item, ...]:
        """Take the answer to an order: let its blocks go and order further ones. Return its
        items."""
        items, num_offered = self._in_flight.pop(ticket, ((), 0))
        self._backlogs[store].num_in_flight -= len(items)
        self._backlogs[store].num_offered -= num_offered
        for g, _, block in items:
            self._tier.release(g, block)
        if items:
            self._order(store, self.max_blocks)
        return items

    def _order(self, store: int, max_blocks: int) -> None:
        """Order waiting blocks up to the limit. Blocks that have lost their name meanwhile, after a
        reset or an error, are let go."""
        backlog, items, num_offered = self._backlogs[store], list[Item](), 0
        while len(backlog) > backlog.num_in_flight and backlog.num_in_flight < max_blocks:
            (g, digest, block), is_offered = backlog.next()
            if self._tier.lookup(g, digest) == block:
                items.append((g, digest, block))
                backlog.num_in_flight += 1
                num_offered += is_offered
            else:
                self._tier.release(g, block)
                backlog.num_offered -= is_offered
        if items:
            ticket = self._tickets.next()
            self._in_flight[ticket] = tuple(items), num_offered
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
