"""When blocks that a step copies out to host memory become valid there."""

import pytest

from quire.kv.manager import KVManager
from quire.spec.cache_group import CacheGroup

FULL = CacheGroup("full", (0,), 1, 8)


def test_copies_to_host_memory_are_settled_with_the_result_of_their_step() -> None:
    kv = KVManager((FULL,), (4,), 4, host_limits=[4])
    tier = kv.tier
    assert tier is not None
    for step_id, name in ((3, b"x"), (5, b"y")):
        tier._fresh = [(0, name)]
        tier.end_plan(step_id)
    settled = [tier.settle(step_id) for step_id in range(2, 7)]
    assert settled == [[], [(0, b"x")], [], [(0, b"y")], []]


@pytest.mark.parametrize("is_evicted", [True, False])
def test_a_block_that_a_plan_copies_out_is_held_until_its_result(is_evicted: bool) -> None:
    """Host memory has room for one block. No other block is copied there before the result of the
    first copy, and one is afterwards."""
    kv = KVManager((FULL,), (4,), 4, host_limits=[1])
    [pool], tier = kv.pools, kv.tier
    assert tier is not None

    def copy(name: bytes) -> list[int]:
        block = pool.allocate()
        pool.index(block, name)
        if is_evicted:
            pool.release(block)
            assert pool.evict()
            [(_, destination)] = tier.take_evicted()
        else:
            destination = []
            tier.copy_out(0, block, name, ([], destination))
        return destination

    first = copy(b"a")
    assert len(first) == 1 and copy(b"b") == []  # of the same plan
    tier.end_plan(1)
    assert copy(b"c") == []  # of the next plan
    tier.end_plan(2)
    assert tier.settle(1) == [(0, b"a")]
    assert copy(b"d") == first


def test_forget_unsettled_removes_the_names_of_unsettled_copies() -> None:
    """Each block that was copied out counts once."""
    kv = KVManager((FULL,), (4,), 4, host_limits=[4])
    [pool], tier = kv.pools, kv.tier
    assert tier is not None
    for step_id, name in enumerate((b"settled", b"in flight", b"planned")):
        block = pool.allocate()
        pool.index(block, name)
        pool.release(block)
        assert pool.evict()
        tier.take_evicted()
        if name != b"planned":
            tier.end_plan(step_id)
        if name == b"settled":
            tier.settle(step_id)
    assert tier.num_offloaded == 3
    tier.forget_unsettled()
    known = [tier._host[0].lookup(name) for name in (b"settled", b"in flight", b"planned")]
    assert known[0] is not None and known[1:] == [None, None]
