"""The buddy allocator against a plain model of memory."""

import random

from benchmarks.paper.baselines.buddy import BuddyAllocator


def test_random_allocations_never_overlap_and_are_all_freed() -> None:
    for num in (64, 100, 1023, 1500):
        rng, memory, owner = random.Random(num), BuddyAllocator(num), [None] * num
        allocated: dict[int, int] = {}
        for step in range(400):
            if allocated and rng.random() < 0.45:
                offset = rng.choice(sorted(allocated))
                size = allocated.pop(offset)
                assert owner[offset : offset + size] == [offset] * size
                owner[offset : offset + size] = [None] * size
                memory.free(offset)
            else:
                size = BuddyAllocator.rounded(rng.randint(1, 80))
                offset = memory.allocate(rng.randint(size // 2 + 1, size))
                if offset is None:
                    assert memory.largest_free < size
                    continue
                assert owner[offset : offset + size] == [None] * size, (num, step)
                owner[offset : offset + size] = [offset] * size
                allocated[offset] = size
            assert memory.num_free == owner.count(None)
        for offset in allocated:
            memory.free(offset)
        assert memory.largest_free == 1 << (num.bit_length() - 1)
