"""Blocks per group from a budget in bytes: one more block would exceed it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import OutOfMemory
from quire.kv.manager import KVManager
from quire.kv.sizing import (
    MIB,
    MIN_STATES,
    SNAPSHOT_TOKENS,
    host_tier_blocks,
    longest_sequence,
    min_pool_bytes,
    sequences_that_fit,
    size_pools,
)
from quire.spec.cache_group import CacheGroup

FULL = CacheGroup("full", (0, 1, 2), 2, 8)
WINDOW = CacheGroup("window", (3, 4), 2, 8, window=20)
WIDE = CacheGroup("window", (5,), 2, 8, window=70)
STATES = CacheGroup("state", (6, 7, 8), state_size=6000)  # as much as 125 tokens of FULL
HYBRIDS = [(FULL, STATES), (FULL, WINDOW, STATES)]
GROUPS = [(FULL,), (WINDOW,), (FULL, WINDOW), (FULL, WINDOW, WIDE)]


def bytes_of(groups: tuple[CacheGroup, ...], block_size: int) -> list[int]:
    return [group.block_bytes(block_size, 4) for group in groups]


def max_in_window(group: CacheGroup, block_size: int, rows: int, chunk: int) -> int:
    """Blocks that all rows hold at once: their windows, each cut by blocks, and the new tokens."""
    assert group.window is not None
    return rows * (-(-group.window // block_size) + 2) + -(-chunk // block_size)


@settings(max_examples=300, deadline=None)
@given(
    groups=st.sampled_from(GROUPS),
    budget=st.integers(0, 3_000_000),
    block_size=st.sampled_from([1, 4, 7, 16]),
    length=st.integers(2, 200),
    rows=st.integers(1, 9),
    chunk=st.integers(1, 64),
)
def test_pools_are_as_large_as_the_budget_allows(
    groups: tuple[CacheGroup, ...],
    budget: int,
    block_size: int,
    length: int,
    rows: int,
    chunk: int,
) -> None:
    costs = bytes_of(groups, block_size)
    per_sequence = -(-length // block_size) + 1

    def cost(blocks: int) -> int:
        """Return the bytes of pools of so many blocks, none larger than its group can use."""
        return sum(min(blocks, most) * c for most, c in zip(caps, costs, strict=True))

    caps = [
        1 << 40 if g.window is None else max_in_window(g, block_size, rows, chunk) for g in groups
    ]
    try:
        pools = size_pools(groups, costs, budget, block_size, length, rows, chunk)
    except OutOfMemory:
        assert cost(per_sequence) > budget
        return
    assert sum(n * c for n, c in zip(pools, costs, strict=True)) <= budget
    level = max(pools) if any(n < cap for n, cap in zip(pools, caps, strict=True)) else None
    assert all(n <= cap for n, cap in zip(pools, caps, strict=True))
    assert max(pools) <= per_sequence * rows
    if level is not None:
        assert pools == tuple(min(level, cap) for cap in caps)
        assert level == per_sequence * rows or cost(level + 1) > budget
    needs = KVManager(groups, pools, block_size).group_blocks(length, 0, 1, min(chunk, length))
    assert all(need <= num for need, num in zip(needs, pools, strict=True))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [2, 16, 17, 333])
def test_min_pool_bytes_is_the_exact_minimum(groups: tuple[CacheGroup, ...], length: int) -> None:
    """One byte less, and there is no room for one sequence."""
    costs = bytes_of(groups, 16)
    min_bytes = min_pool_bytes(groups, costs, 16, length, 4, 64)
    size_pools(groups, costs, min_bytes, 16, length, 4, 64)
    with pytest.raises(OutOfMemory):
        size_pools(groups, costs, min_bytes - 1, 16, length, 4, 64)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("length", [1, 16, 17, 150])
def test_sequences_that_fit_agrees_with_the_manager(
    groups: tuple[CacheGroup, ...], length: int, block_size: int
) -> None:
    """Each sequence grows token by token to its length, and keeps its blocks."""
    pools = tuple(301 + 7 * g for g in range(len(groups)))
    manager = KVManager(groups, pools, block_size)

    def grows() -> bool:
        sequence = manager.new_sequence()
        return all(manager.allocate_slots(sequence, 1) is not None for _ in range(length))

    count = 0
    while grows():
        count += 1
    fitting = sequences_that_fit(groups, pools, block_size, length)
    assert fitting <= count <= fitting * 1.5 + 1
    if groups == (FULL,):
        assert count == fitting


@settings(max_examples=300, deadline=None)
@given(
    groups=st.sampled_from(HYBRIDS),
    budget=st.integers(0, 20_000_000),
    block_size=st.sampled_from([4, 16]),
    length=st.integers(2, 2000),
    rows=st.integers(1, 40),
)
def test_states_have_half_of_the_memory_unless_a_sequence_needs_it(
    groups: tuple[CacheGroup, ...], budget: int, block_size: int, length: int, rows: int
) -> None:
    costs = bytes_of(groups, block_size)
    min_bytes = min_pool_bytes(groups, costs, block_size, length, rows, 64)
    try:
        pools = size_pools(groups, costs, budget, block_size, length, rows, 64)
    except OutOfMemory:
        assert budget < min_bytes
        return
    assert budget >= min_bytes
    full, num_states = pools[0], pools[-1]
    per_sequence = -(-length // block_size) + 1
    assert sum(n * c for n, c in zip(pools, costs, strict=True)) <= budget
    assert per_sequence <= full <= per_sequence * rows
    min_states = min(full, MIN_STATES)
    max_states = max(MIN_STATES, 2 * rows) + full * block_size // SNAPSHOT_TOKENS
    assert min_states <= num_states <= min(full, max_states)
    if num_states > min_states:
        assert num_states * costs[-1] <= budget / 2
    if num_states < min(full, max_states):
        left = budget - (min_bytes - min(per_sequence, MIN_STATES) * costs[-1])  # by one sequence
        assert (num_states + 1) * costs[-1] > min(budget / 2, left)
    needs = KVManager(groups, pools, block_size).group_blocks(length, 0, 1, min(64, length))
    assert all(need <= num for need, num in zip(needs, pools, strict=True))


@pytest.mark.parametrize("groups", HYBRIDS)
@pytest.mark.parametrize("budget", [3_000_000, 1_700_000, 700_000])
def test_the_longest_sequence_leaves_states_their_half(
    groups: tuple[CacheGroup, ...], budget: int
) -> None:
    costs = bytes_of(groups, 16)
    length = longest_sequence(groups, costs, budget, 16, 100_000, 4, 64)
    pools = size_pools(groups, costs, budget, 16, length, 4, 64)
    assert pools[-1] == max(MIN_STATES, min(budget // 2 // costs[-1], 8 + length // 512))


def test_an_error_reports_the_memory_of_states() -> None:
    costs = bytes_of(HYBRIDS[0], 16)
    states = r"6 states of 0\.1 MiB each"
    with pytest.raises(OutOfMemory, match=rf"\(1 MiB with {states}\)\. Lower max_model_len"):
        size_pools(HYBRIDS[0], costs, 500_000, 16, 1000, 4, 64)
    with pytest.raises(OutOfMemory, match=rf"holds 1 blocks of 16 tokens with {states}, too few"):
        longest_sequence(HYBRIDS[0], costs, 100_000, 16, 1000, 4, 64)


def test_host_memory_has_states_in_proportion_and_equal_numbers_of_blocks() -> None:
    groups = HYBRIDS[1]
    costs = bytes_of(groups, 16)
    full, window, states = host_tier_blocks(groups, costs, (1000, 20, 50), 10_000_000)
    assert full == window and full // states == 20
    assert 9_900_000 < full * (costs[0] + costs[1]) + states * costs[2] <= 10_000_000


def test_a_window_group_leaves_the_rest_to_full_groups() -> None:
    costs = bytes_of((FULL, WINDOW), 4)
    full, window = size_pools((FULL, WINDOW), costs, 500_000, 4, 1000, 2, 8)
    assert window == max_in_window(WINDOW, 4, 2, 8) == 16
    assert full == (500_000 - 16 * costs[1]) // costs[0]


def test_a_pool_gets_another_block_once_the_budget_covers_it() -> None:
    (cost,) = bytes_of((FULL,), 4)
    for budget, blocks in ((11 * cost - 1, 10), (11 * cost, 11), (11 * cost + 1, 11)):
        assert size_pools((FULL,), [cost], budget, 4, 20, 2, 8) == (blocks,)


def test_a_budget_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(OutOfMemory) as caught:
        size_pools((FULL,), bytes_of((FULL,), 16), 2 * MIB, 16, 100_000, 4, 256)
    message = str(caught.value)
    assert "KV pool of 2 MiB" in message and "max_model_len=100,000" in message
    assert "Lower max_model_len" in message and "kv_cache_memory_bytes" in message


@settings(max_examples=200, deadline=None)
@given(
    groups=st.sampled_from(GROUPS),
    budget=st.integers(0, 3_000_000),
    block_size=st.sampled_from([1, 4, 7, 16]),
    limit=st.integers(2, 3000),
    rows=st.integers(1, 9),
    chunk=st.integers(1, 64),
)
def test_the_longest_sequence_that_fits(
    groups: tuple[CacheGroup, ...], budget: int, block_size: int, limit: int, rows: int, chunk: int
) -> None:
    """Pools for it can be made, and none for one more block of tokens."""
    costs = bytes_of(groups, block_size)

    def fits(length: int) -> bool:
        try:
            size_pools(groups, costs, budget, block_size, length, rows, chunk)
        except OutOfMemory:
            return False
        return True

    try:
        length = longest_sequence(groups, costs, budget, block_size, limit, rows, chunk)
    except OutOfMemory:
        assert not fits(max(2, block_size))
        return
    assert 2 <= length <= limit and fits(length)
    assert length == limit or (length % block_size == 0 and not fits(length + 1))


def test_a_budget_without_room_for_any_sequence_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"holds 1 blocks of 16 .*kv_cache_memory_bytes"):
        longest_sequence((FULL,), [MIB], MIB, 16, 100, 4, 256)


@settings(max_examples=200, deadline=None)
@given(
    groups=st.sampled_from([*GROUPS, (CacheGroup("chunked", (0,), 2, 8, window=32), FULL)]),
    block_size=st.sampled_from([1, 4, 16]),
    length=st.integers(2, 200),
    rows=st.integers(1, 9),
    chunk=st.integers(1, 400),
)
def test_as_many_samples_as_rows_fit(
    groups: tuple[CacheGroup, ...], block_size: int, length: int, rows: int, chunk: int
) -> None:
    """Pools without a limit hold a request of n samples for any n up to the rows: the samples share
    one step's tokens, so no window gets a whole chunk for each of them."""
    costs = bytes_of(groups, block_size)
    pools = size_pools(groups, costs, 1 << 40, block_size, length, rows, chunk)
    kv = KVManager(groups, pools, block_size)
    for num in range(1, rows + 1):
        needs = kv.group_blocks(length, 0, num, min(chunk, length))
        assert all(need <= pool for need, pool in zip(needs, pools, strict=True))


def test_samples_share_the_chunk_of_one_step() -> None:
    """A window of 20 tokens holds 19 before the next one: 6 blocks of 4 with one that both ends
    cut. A chunk of 40 brings 10 more once, and a begun block for each other sample."""
    kv = KVManager((WINDOW,), (500,), 4)
    assert kv.group_blocks(200, 0, 1, 40) == [6 + 10]
    assert kv.group_blocks(200, 0, 8, 40) == [8 * 6 + 10 + 7]
    assert kv.group_blocks(8, 0, 8, 8) == [8 * 2]  # never more than the sequence has
