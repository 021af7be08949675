"""Which block the pool hands out next, and what the index remembers."""

from collections import OrderedDict

import numpy as np
import pytest

from quire.kv.pool import BlockPool, MakeEviction
from quire.kv.table import NULL
from quire.scheduler.policy.lfu import Lfu


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(4)
    assert take(pool, 3) == [0, 1, 2]
    pool.release(1)
    pool.release(0)
    assert take(pool, 3) == [0, 1, 3]


def test_free_blocks_are_allocated_before_cached_ones_and_these_by_age() -> None:
    pool = BlockPool(4)
    take(pool, 3)
    for block_id in (2, 0, 1):
        pool.index(block_id, b"%d" % block_id)
        pool.release(block_id)
    assert pool.num_free == 4
    assert take(pool, 2) == [3, 2], "block 3 was never used; of the others 2 was freed first"
    assert pool.lookup(b"2") is None
    assert pool.lookup(b"0") == 0
    assert list(pool.lost) == [b"2"]


def test_a_hit_makes_a_cached_block_most_recently_used() -> None:
    pool = BlockPool(2)
    take(pool, 2)
    for block_id in (0, 1):
        pool.index(block_id, b"%d" % block_id)
        pool.release(block_id)
    pool.acquire(0)
    pool.release(0)
    assert take(pool, 1) == [1]


def test_the_first_block_of_equal_content_keeps_the_name() -> None:
    pool = BlockPool(2)
    take(pool, 2)
    pool.index(0, b"same")
    pool.index(1, b"same")
    assert pool.lookup(b"same") == 0
    assert not pool.is_indexed(1)
    pool.check_invariants([0, 1])


def test_a_reset_makes_cached_blocks_free() -> None:
    pool = BlockPool(2)
    take(pool, 2)
    pool.index(0, b"a")
    pool.index(1, b"b")
    pool.release(0)
    pool.reset_index()
    assert pool.num_indexed == 0
    pool.check_invariants([1])


def test_each_change_of_the_index_is_counted() -> None:
    """A caller compares the count to see whether its look-up is still valid."""
    pool = BlockPool(2)
    take(pool, 2)
    pool.index(0, b"a")
    assert pool.num_index_changes == 1
    pool.index(1, b"a")
    assert pool.num_index_changes == 1, "the other block stays"
    pool.unindex(0)
    assert pool.num_index_changes == 2
    pool.unindex(0)
    assert pool.num_index_changes == 2


def test_each_name_that_a_block_loses_is_counted() -> None:
    pool = BlockPool(1)
    pool.allocate()
    pool.index(0, b"first")
    pool.unindex(0)
    pool.index(0, b"second")
    pool.release(0)
    assert pool.num_names_lost(0) == 1
    assert pool.allocate() == 0, "the cached block is evicted"
    assert pool.num_names_lost(0) == 2


def test_block_zero_may_be_in_use_and_the_null_block_is_not() -> None:
    pool = BlockPool(2)
    pool.allocate()
    assert list(map(pool.is_in_use, (0, 1, NULL))) == [True, False, False]


@pytest.mark.parametrize("make_eviction", [OrderedDict, Lfu])
def test_allocating_many_blocks_equals_allocating_them_one_by_one(
    make_eviction: MakeEviction,
) -> None:
    """Free blocks first, then evicted ones, with the same names lost in the same order."""
    rng = np.random.default_rng(5)
    together, apart = (BlockPool(12, None, make_eviction) for _ in range(2))
    held: list[int] = []
    for turn in range(300):
        num = int(rng.integers(0, together.num_free + 1))
        taken = together.allocate_all(num)
        assert taken == take(apart, num), turn
        named = [block_id for block_id in taken if rng.random() < 0.7]
        digests = [b"%d %d" % (turn, block_id) for block_id in named]
        together.index_all(named, digests)
        for block_id, digest in zip(named, digests, strict=True):
            apart.index(block_id, digest)
        held += taken
        rng.shuffle(held)
        freed, held = held[: len(held) // 2], held[len(held) // 2 :]
        together.release_all(freed)
        for block_id in freed:
            apart.release(block_id)
        assert together.num_index_changes == apart.num_index_changes
        assert together.lost == apart.lost and together.indexed_blocks() == apart.indexed_blocks()
        together.check_invariants(held)


def test_allocating_more_blocks_than_are_free_asserts() -> None:
    with pytest.raises(AssertionError, match="more blocks are allocated than are free"):
        BlockPool(2).allocate_all(3)


def test_all_blocks_of_a_prompt_are_looked_up_in_one_call() -> None:
    pool = BlockPool(6)
    blocks, names = pool.allocate_all(4), [bytes([i]) * 32 for i in range(5)]
    pool.index_all(blocks[:2] + blocks[3:], names[:2] + names[3:4])
    assert pool.lookup_all(names) == [*blocks[:2], None, blocks[3], None]
    assert [pool.num_leading(names, num) for num in (0, 1, 2, 5)] == [0, 1, 2, 2]
    assert pool.num_leading(names[:2], 2) == 2
    pool.release_all(blocks[1:3])
    assert pool.num_idle([-1, -2, *blocks]) == 2
