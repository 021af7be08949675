"""The buddy allocator against a plain model of memory."""

import random

import pytest

from benchmarks.paper.baselines.buddy import BuddyAllocator


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert [BuddyAllocator.rounded(n) for n in (1, 2, 3, 4, 5, 25, 2048, 2049)] == [
        1, 2, 4, 4, 8, 32, 2048, 4096,
    ]  # fmt: skip


def test_chunks_split_and_merge() -> None:
    memory = BuddyAllocator(16)
    assert memory.allocate(5) == 0  # the first half
    assert memory.allocate(3) == 8  # the first quarter of the other half
    assert (memory.num_free, memory.largest_free) == (4, 4)
    assert memory.allocate(5) is None  # 4 slots are free, and 8 are wanted
    memory.free(8)
    assert memory.largest_free == 8  # the quarters are one again
    memory.free(0)
    assert memory.allocate(16) == 0


def test_what_is_free_may_not_be_together() -> None:
    memory = BuddyAllocator(16)
    offsets = [memory.allocate(4) for _ in range(4)]
    memory.free(offsets[0])
    memory.free(offsets[2])
    assert (memory.num_free, memory.largest_free) == (8, 4)
    assert memory.allocate(8) is None


def test_memory_of_any_size_is_a_sum_of_powers_of_two() -> None:
    memory = BuddyAllocator(15_700)
    assert memory.num_free == 15_700
    assert memory.largest_free == 8192
    assert sum(memory.allocate(2048) is not None for _ in range(10)) == 7


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    """Chunks never overlap nor leave the memory, and all of it comes back."""
    rng = random.Random(seed)
    num = rng.choice((64, 100, 1023, 1500))
    memory, owner = BuddyAllocator(num), [None] * num
    held: dict[int, int] = {}
    for step in range(400):
        if held and rng.random() < 0.45:
            offset = rng.choice(sorted(held))
            size = held.pop(offset)
            assert owner[offset : offset + size] == [offset] * size
            owner[offset : offset + size] = [None] * size
            memory.free(offset)
        else:
            size = BuddyAllocator.rounded(rng.randint(1, 80))
            offset = memory.allocate(rng.randint(size // 2 + 1, size))
            if offset is None:
                assert memory.largest_free < size
                continue
            assert owner[offset : offset + size] == [None] * size, step
            owner[offset : offset + size] = [offset] * size
            held[offset] = size
        assert memory.num_free == owner.count(None)
    for offset in held:
        memory.free(offset)
    assert memory.largest_free == 1 << (num.bit_length() - 1)
