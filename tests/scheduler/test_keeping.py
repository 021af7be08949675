"""Blocks on their way to stores: which are ordered, which wait, and that none of them is lost."""

import pytest

from quire.base.kv_orders import Item, Keep, Order
from quire.kv.manager import KVManager
from quire.scheduler.reuse import keeping as module
from quire.scheduler.reuse.keeping import HostHolds, Keeping, Tickets
from quire.spec.cache_group import CacheGroup

GROUP = CacheGroup("full", (0,), num_kv_heads=1, head_dim=1)
NUM_HOST = 12


class Lab:
    """Host memory of 12 blocks, of which at most 3 are in flight to a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_stores: int = 1) -> None:
        monkeypatch.setattr(module, "MAX_KEEP_BLOCKS", 3)
        self.kv = KVManager((GROUP,), (4,), 4, host_limits=(NUM_HOST,))
        assert self.kv.tier is not None
        self.tier, self.pool = self.kv.tier, self.kv.host_pools[0]
        self.orders: list[Order] = []
        self.keeping = Keeping(self.tier, self.orders, num_stores, (1,), Tickets())
        self.num = 0

    def add(self, num: int) -> list[tuple[int, bytes]]:
        """Copy new blocks to host memory, which evicts old ones, and return their names."""
        names = []
        for _ in range(num):
            block = self.tier.allocate(0)
            assert block is not None, "all host blocks are held"
            self.num += 1
            names.append((0, b"%d" % self.num))
            self.tier.keep_fetched(0, block, names[-1][1])
        return names

    def ordered(self) -> list[Keep]:
        found = [order for order in self.orders if isinstance(order, Keep)]
        self.orders.clear()
        return found

    def check(self) -> None:
        self.pool.check_invariants(self.keeping.held_blocks(0))


def names_of(items: tuple[Item, ...]) -> list[tuple[int, bytes]]:
    return [(g, digest) for g, digest, _ in items]


def test_blocks_beyond_the_limit_wait_and_follow_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    names = lab.add(8)
    lab.keeping.keep(names)
    [first] = lab.ordered()
    assert names_of(first.items) == names[:3] and lab.keeping.backlog == 8
    assert lab.keeping.take(0, first.ticket) == first.items
    [second] = lab.ordered()
    assert names_of(second.items) == names[3:6] and second.ticket != first.ticket
    lab.check()
    lab.keeping.take(0, second.ticket)
    [third] = lab.ordered()
    assert names_of(third.items) == names[6:]
    lab.keeping.take(0, third.ticket)
    assert lab.keeping.backlog == 0 and not lab.orders and not lab.keeping.held_blocks(0)
    assert lab.keeping.take(0, third.ticket) == (), "an order is answered once"


def test_host_memory_evicts_stored_blocks_and_not_waiting_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that a store has can be fetched; a block that waits would have to be computed."""
    lab = Lab(monkeypatch)
    kept = lab.add(3)
    lab.keeping.keep(kept)
    [order] = lab.ordered()
    lab.keeping.take(0, order.ticket)
    waiting = lab.add(9)
    lab.keeping.keep(waiting)
    lab.tier.hold(0, lab.pool.lookup(kept[0][1]) or 0)  # used since, so it is evicted last
    lab.tier.end_plan(1)
    lab.tier.settle(1)
    lab.add(3)
    assert all(lab.tier.lookup(*name) is None for name in kept)
    assert all(lab.tier.lookup(*name) is not None for name in waiting)
    lab.check()


def test_waiting_blocks_fill_at_most_half_of_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch)
    names = lab.add(12)
    lab.keeping.keep(names)
    assert len(lab.keeping.held_blocks(0)) == 3 + 6, "three are in flight"
    lab.add(3)
    lab.check()


def test_each_store_has_a_backlog_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold a quarter of host memory, three blocks."""
    lab = Lab(monkeypatch, num_stores=2)
    names = lab.add(5)
    lab.keeping.keep(names)
    one, other = lab.ordered()
    assert (one.store, other.store) == (0, 1)
    assert names_of(one.items) == names_of(other.items) == names[:3]
    lab.keeping.take(1, other.ticket)
    [more] = lab.ordered()
    assert more.store == 1 and names_of(more.items) == names[3:]
    lab.check()


def test_names_that_are_forgotten_while_they_wait_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(monkeypatch)
    names = lab.add(6)
    lab.keeping.keep(names)
    [first] = lab.ordered()
    lab.tier.forget(names[3:5])
    lab.keeping.take(0, first.ticket)
    [second] = lab.ordered()
    assert names_of(second.items) == names[5:]
    lab.check()


def test_at_shutdown_all_blocks_are_ordered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.keeping.keep(lab.add(5))
    lab.keeping.keep(lab.add(6), max_blocks=1 << 30)
    assert [len(order.items) for order in lab.ordered()] == [3, 8]


def test_offered_blocks_are_ordered_before_evicted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are in flight and six wait, which is the limit. The newest waiting ones make room."""
    lab = Lab(monkeypatch)
    evicted = lab.add(9)
    lab.keeping.keep(evicted)
    [first] = lab.ordered()
    offered = lab.add(2)
    lab.keeping.keep(offered, offered=offered)
    assert lab.keeping.num_offered == 2 and lab.keeping.backlog == 9
    lab.check()
    lab.keeping.take(0, first.ticket)
    [second] = lab.ordered()
    assert names_of(second.items) == [*offered, evicted[3]]
    lab.keeping.take(0, second.ticket)
    assert lab.keeping.num_offered == 0
    [third] = lab.ordered()
    assert names_of(third.items) == evicted[4:7], "the other two were dropped"
    lab.check()


def test_offered_blocks_that_lose_their_name_take_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    lab.keeping.keep(lab.add(3))
    [first] = lab.ordered()
    offered = lab.add(2)
    lab.keeping.keep(offered, offered=offered)
    lab.tier.forget(offered)
    lab.keeping.take(0, first.ticket)
    assert lab.keeping.num_offered == lab.keeping.backlog == 0 and not lab.ordered()
    lab.check()


@pytest.mark.parametrize(("sizes", "num"), [((), 3), ((60,), 2), ((10, 200), 1)])
def test_the_byte_limit_reduces_the_number_of_blocks_in_flight(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], num: int
) -> None:
    lab = Lab(monkeypatch)
    monkeypatch.setattr(module, "MAX_KEEP_BYTES", 120)
    assert Keeping(lab.tier, lab.orders, 1, sizes, Tickets()).max_blocks == num


# ---- waiting requests ------------------------------------------------------------------------


def lab() -> tuple[KVManager, HostHolds, list[tuple[int, bytes]]]:
    """Host memory full of 8 blocks, of which requests may hold 2."""
    kv = KVManager((GROUP,), (4,), 4, host_limits=(8,))
    assert kv.tier is not None
    names = [(0, b"%d" % i) for i in range(8)]
    for g, digest in names:
        block = kv.tier.allocate(g)
        assert block is not None
        kv.tier.keep_fetched(g, block, digest)
    return kv, HostHolds(kv.tier), names


def test_held_blocks_are_not_evicted() -> None:
    kv, holds, names = lab()
    assert kv.tier is not None
    holds.hold("r", names[:2])
    for i in range(6):
        block = kv.tier.allocate(0)
        assert block is not None
        kv.tier.keep_fetched(0, block, b"new %d" % i)
    assert [kv.tier.lookup(*name) is not None for name in names] == [True] * 2 + [False] * 6
    kv.host_pools[0].check_invariants(holds.held_blocks(0))


def test_all_requests_together_hold_at_most_a_share_of_host_memory() -> None:
    kv, holds, names = lab()
    holds.hold("one", [names[0], (0, b"nowhere")])
    holds.hold("two", names[1:])
    assert len(holds.held_blocks(0)) == 2
    holds.hold("one", names[5:6])
    assert len(holds.held_blocks(0)) == 2, "they replace its earlier ones"
    holds.release("two")
    holds.release("two")
    assert len(holds.held_blocks(0)) == 1
    holds.release_all()
    assert not holds.held_blocks(0)
    kv.host_pools[0].check_invariants([])


def test_offered_blocks_are_counted_for_the_slowest_store(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, num_stores=2)
    names = lab.add(2)
    lab.keeping.keep(names, offered=names)
    first, second = lab.ordered()
    lab.keeping.take(0, first.ticket)
    assert lab.keeping.num_offered == 2
    lab.keeping.take(1, second.ticket)
    assert lab.keeping.num_offered == 0


def test_released_holds_make_room_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch)
    holds, names = HostHolds(lab.tier), lab.add(5)
    for _ in range(NUM_HOST):
        holds.hold("r", names)
        assert len(holds.held_blocks(0)) == NUM_HOST // module.WAITING_SHARE == 3
        holds.release("r")
