"""Blocks that a sequence needs in each kind of cache group, compared with the tokens that
attention reads."""

import random

import pytest

from quire.kv.manager import KVManager
from quire.kv.table import NULL
from quire.spec.cache_group import (
    CHUNKED,
    FULL,
    KINDS,
    LATENT,
    STATE,
    STEP,
    WINDOW,
    CacheGroup,
    equal_parts,
)
from tests.kv.test_manager import digests_of

SIZE = 4


def group_of(kind: str, span: int) -> CacheGroup:
    return CacheGroup(kind, (0,), 1, 8, span if kind in (WINDOW, CHUNKED) else None, 64)


def tokens_read(kind: str, span: int, position: int) -> set[int]:
    """Return the earlier tokens that the token at a position reads, without block arithmetic."""
    earlier = range(position)
    if kind == WINDOW:
        return {j for j in earlier if position - j < span}
    if kind == CHUNKED:
        return {j for j in earlier if j // span == position // span}
    return {position - 1} & set(earlier) if kind == STATE else set(earlier)


@pytest.mark.parametrize("kind", KINDS)
def test_first_needed_token_is_the_first_token_read(kind: str) -> None:
    for span in (2, 3, 4, 6, 8, 13):
        for position in range(40):
            read = tokens_read(kind, span, position)
            assert group_of(kind, span).first_needed(position) == min(read, default=position)


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hit_is_the_longest_with_all_blocks_its_next_token_reads(kind: str) -> None:
    """The prefix index of each group has lost random blocks of the sequence."""
    draws = random.Random(0)
    for _ in range(200):
        span = draws.choice((2, 4, 6, 8, 13))
        groups = (group_of(FULL, 0), group_of(kind, span))
        kv = KVManager(groups, (12, 12), SIZE)
        sequence, digests = kv.new_sequence(), digests_of(40)
        kv.states.keep_states(sequence.tables, range(10))
        assert kv.allocate_slots(sequence, 40) is not None
        kv.index_blocks(sequence, digests, 10)
        written = [list(table.blocks) for table in sequence.tables]
        kv.states.end_plan()
        lost = [{i for i in range(10) if draws.random() < share} for share in (0.1, 0.4)]
        for pool, blocks, indices in zip(kv.pools, written, lost, strict=True):
            for i in indices:
                pool.unindex(blocks[i])

        def is_a_hit(length: int, span: int = span, lost: list[set[int]] = lost) -> bool:
            reads = tokens_read(FULL, 0, length * SIZE), tokens_read(kind, span, length * SIZE)
            return not any(
                {token // SIZE for token in read} & indices
                for read, indices in zip(reads, lost, strict=True)
            )

        num_blocks = max(n for n in range(11) if is_a_hit(n))
        hit = kv.get_computed_blocks(digests, 41)
        assert hit.num_tokens == num_blocks * SIZE
        first = min(tokens_read(kind, span, num_blocks * SIZE), default=num_blocks * SIZE) // SIZE
        assert hit.blocks[1] == [NULL] * first + written[1][first:num_blocks]


def test_kernel_window_encodes_windows_and_chunks() -> None:
    assert group_of(FULL, 5).kernel_window == group_of(STATE, 5).kernel_window == 0
    assert group_of(WINDOW, 5).kernel_window == 5
    assert group_of(CHUNKED, 5).kernel_window == -5


def test_after_shifts_the_layer_indices() -> None:
    assert CacheGroup(FULL, (0, 2)).after(3) == CacheGroup(FULL, (3, 5))


def test_block_bytes_by_kind_and_dtype() -> None:
    layers = (0, 2, 5)
    assert CacheGroup(FULL, layers, 2, 8).block_bytes(16, 2) == 3 * 2 * 2 * 8 * 16 * 2
    assert CacheGroup(LATENT, layers, 1, 8).block_bytes(16, 2) == 3 * 8 * 16 * 2
    state = CacheGroup(STATE, layers, state_size=100)
    assert state.block_bytes(16, 2) == state.block_bytes(32, 4) == 3 * 100 * 4
    assert state.block_bytes(16, 8) == 3 * 100 * 8
    assert state.stored_block_bytes(16, 2, "int8") == state.block_bytes(16, 2)
    assert state.stored_block_bytes(16, 2, "fp8") == state.block_bytes(16, 2)
    full, step = CacheGroup(FULL, layers, 2, 8), CacheGroup(STEP, layers, 2, 8)
    assert full.stored_block_bytes(16, 2, "auto") == full.block_bytes(16, 2)
    assert full.stored_block_bytes(16, 2, "fp8") == 3 * 2 * 2 * 8 * 16
    assert full.stored_block_bytes(16, 2, "int8") == 3 * 2 * 2 * 16 * (8 + 4)
    assert step.block_bytes(16, 2) == 0


def test_memory_shape_by_kind_and_dtype() -> None:
    """A STEP group has the memory of one layer."""
    layers = (0, 2, 5)
    full, step = CacheGroup(FULL, layers, 2, 8), CacheGroup(STEP, layers, 2, 8)
    assert full.memory_shape(7, 16, "auto") == (2, 3, 2, 7, 16, 8)
    assert full.memory_shape(7, 16, "int8") == (2, 3, 2, 7, 16, 12)
    assert step.memory_shape(7, 16, "auto") == (2, 1, 2, 7, 16, 8)
    assert CacheGroup(STEP, (), 2, 8).memory_shape(7, 16, "auto")[1] == 0
    state = CacheGroup(STATE, layers, state_size=100)
    assert state.memory_shape(7, 16, "auto") == (1, 3, 1, 7, 1, 100)


@pytest.mark.parametrize(
    ("kind", "span", "blocks"), [(FULL, 0, 25), (WINDOW, 8, 3), (CHUNKED, 8, 3), (STATE, 0, 2)]
)
def test_max_blocks_of_a_long_sequence(kind: str, span: int, blocks: int) -> None:
    assert group_of(kind, span).max_blocks(100, SIZE) == blocks
    assert group_of(kind, span).max_blocks(3, SIZE) == 1
    in_chunks = blocks + (2 if kind in (WINDOW, CHUNKED, STATE) else 0)
    assert group_of(kind, span).max_blocks(100, SIZE, chunk=8) == in_chunks


def test_heads_are_split_into_as_few_equal_parts_as_possible() -> None:
    for num_heads in range(1, 45):
        for max_heads in range(1, 45):
            sizes = [n for n in range(1, max_heads + 1) if num_heads % n == 0]
            assert equal_parts(num_heads, max_heads) == num_heads // max(sizes)


def test_latent_groups_have_one_vector_per_token() -> None:
    group = CacheGroup(LATENT, (0, 2), 1, 576)
    assert group.memory_shape(10, 16, "auto") == (1, 2, 1, 10, 16, 576)
    assert group.memory_shape(10, 16, "int8") == (1, 2, 1, 10, 16, 580)
    assert group.stored_block_bytes(16, 2, "auto") == 2 * 16 * 576 * 2
    assert group.stored_block_bytes(16, 2, "int8") == 2 * 16 * 580
    assert group.stored_block_bytes(16, 2, "fp8") == 2 * 16 * 576
