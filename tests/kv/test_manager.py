"""Prefix hits over several cache groups, and growth that happens in all groups or in none."""

import numpy as np
import pytest

from quire.kv.digest import extend_digests
from quire.kv.inspection import check_invariants
from quire.kv.manager import KVManager, SequenceBlocks
from quire.kv.table import NULL
from quire.spec.cache_group import CacheGroup

FULL = CacheGroup("full", (0,), 1, 8)
WINDOW = CacheGroup("window", (1,), 1, 8, window=6)
SIZE = 4


def digests_of(num_tokens: int) -> list[bytes]:
    digests: list[bytes] = []
    tokens = np.arange(num_tokens, dtype=np.int32)
    extend_digests(digests, b"root", tokens, SIZE, num_tokens // SIZE)
    return digests


def computed(kv: KVManager, num_tokens: int) -> SequenceBlocks:
    """Return a sequence whose tokens were computed in one step and whose full blocks are named."""
    sequence = kv.new_sequence()
    assert kv.allocate_slots(sequence, num_tokens) is not None
    digests = digests_of(num_tokens)
    kv.index_blocks(sequence, digests, len(digests))
    return sequence


def test_a_hit_of_the_whole_prompt_omits_its_last_block() -> None:
    kv = KVManager((FULL,), (10,), SIZE)
    computed(kv, 12)
    assert kv.get_computed_blocks(digests_of(12), 12).num_tokens == 8
    assert kv.get_computed_blocks(digests_of(12), 13).num_tokens == 12


def test_a_window_group_needs_only_the_blocks_that_are_still_seen() -> None:
    kv = KVManager((WINDOW,), (10,), SIZE)
    first = computed(kv, 16)
    blocks = list(first.tables[0].blocks)
    for block_id in blocks[:2]:
        kv.pools[0].unindex(block_id)
    hit = kv.get_computed_blocks(digests_of(16), 20)
    # the token at position 16 sees 11..15: blocks 2 and 3
    assert (hit.num_tokens, hit.blocks[0]) == (16, [NULL, NULL, *blocks[2:]])
    kv.pools[0].unindex(blocks[3])
    assert kv.get_computed_blocks(digests_of(16), 20).num_tokens == 0, "position 12 sees 7..11"


def test_a_hit_is_limited_to_the_tokens_that_all_groups_have() -> None:
    kv = KVManager((FULL, WINDOW), (10, 10), SIZE)
    sequence = computed(kv, 16)
    kv.pools[0].unindex(sequence.tables[0].blocks[3])
    hit = kv.get_computed_blocks(digests_of(16), 20)
    assert hit.num_tokens == 12
    assert hit.blocks[0] == sequence.tables[0].blocks[:3]
    assert hit.blocks[1] == [NULL, *sequence.tables[1].blocks[1:3]]


def test_blocks_that_left_the_window_are_freed() -> None:
    kv = KVManager((FULL, WINDOW), (20, 20), SIZE)
    sequence = kv.new_sequence()
    for _ in range(10):
        kv.allocate_slots(sequence, 4)
    assert kv.pools[0].num_used == 10
    assert kv.pools[1].num_used == 3  # 36 + 4 new tokens; position 36 sees 31 and later
    assert sequence.tables[1].num_dropped == 7
    check_invariants(kv, [sequence])
    kv.free(sequence)
    check_invariants(kv, [])


def test_growth_is_all_or_nothing_over_groups() -> None:
    kv = KVManager((FULL, WINDOW), (8, 2), SIZE)
    sequence = kv.new_sequence()
    assert kv.allocate_slots(sequence, 12) is None
    assert [pool.num_used for pool in kv.pools] == [0, 0]
    check_invariants(kv, [sequence])


def test_a_hit_that_cannot_be_extended_is_released() -> None:
    kv = KVManager((FULL,), (4,), SIZE)
    first = computed(kv, 12)
    second = kv.new_sequence()
    hit = kv.get_computed_blocks(digests_of(12), 30)
    assert kv.allocate_slots(second, 18, hit) is None
    check_invariants(kv, [first, second])


def test_needs_include_cached_blocks_that_the_hit_takes_into_use() -> None:
    kv = KVManager((FULL,), (4,), SIZE)
    kv.free(computed(kv, 12))
    hit = kv.get_computed_blocks(digests_of(12), 16)
    assert kv.pools[0].num_free == 4
    needs = kv.needs_with_hit(16, hit, chunk=4)
    assert kv.fits(needs)
    assert not kv.fits(needs, reserve=1)


def test_full_blocks_in_use_are_shared_without_a_copy() -> None:
    kv = KVManager((FULL,), (4,), SIZE)
    computed(kv, 12)
    needs = kv.needs_with_hit(16, kv.get_computed_blocks(digests_of(12), 16), chunk=4)
    assert kv.fits(needs)
    assert not kv.fits(needs, reserve=1)


def test_blocks_that_left_the_window_get_no_names() -> None:
    kv = KVManager((FULL, WINDOW), (20, 20), SIZE)
    sequence = kv.new_sequence()
    for _ in range(10):
        kv.allocate_slots(sequence, 4)
    full, window = (table.blocks for table in sequence.tables)
    assert kv.index_blocks(sequence, digests_of(40), 10) == [full, window[7:]]
    assert [pool.num_indexed for pool in kv.pools] == [10, 3]
    check_invariants(kv, [sequence])


def test_a_freed_sequence_can_be_used_like_a_new_one() -> None:
    """This includes its number of indexed blocks, which is zero again."""
    kv = KVManager((FULL, WINDOW), (10, 10), SIZE)
    sequence = computed(kv, 18)
    kv.free(sequence)
    assert (sequence.num_tokens, sequence.capacity, sequence.num_indexed) == (0, 0, 0)
    assert [(t.blocks, t.num_tokens, t.num_dropped) for t in sequence.tables] == [([], 0, 0)] * 2
    assert kv.allocate_slots(sequence, 6) is not None
    assert kv.index_blocks(sequence, digests_of(6), 1) == [sequence.tables[0].blocks[:1]] * 2
    check_invariants(kv, [sequence])


@pytest.mark.parametrize("keep", [9, 10, 11])
def test_a_block_that_is_written_again_loses_its_name(keep: int) -> None:
    """Otherwise a later hit would read the new tokens. A shared block is copied and keeps it."""
    kv = KVManager((FULL,), (10,), SIZE)
    sequence = computed(kv, 12)
    for is_shared in (True, False):
        other = kv.fork(sequence) if is_shared else sequence
        kv.truncate(other, keep)
        assert kv.num_computed_blocks(digests_of(12), 13) == 3
        done = kv.allocate_slots(other, 1)
        assert done is not None and len(done[0].copies) == is_shared
        assert kv.num_computed_blocks(digests_of(12), 13) == (3 if is_shared else 2)
        if is_shared:
            kv.free(other)
        check_invariants(kv, [sequence])
