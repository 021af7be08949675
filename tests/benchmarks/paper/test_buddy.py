"""The buddy allocator against a plain model of memory."""

import random

from benchmarks.paper.baselines.buddy import BuddyAllocator


def test_random_programs() -> None:
    """Chunks never overlap nor leave the memory, and all of it comes back."""
    for num in (64, 100, 1023, 1500):
        rng, memory, owner = random.Random(num), BuddyAllocator(num), [None] * num
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
                assert owner[offset : offset + size] == [None] * size, (num, step)
                owner[offset : offset + size] = [offset] * size
                held[offset] = size
            assert memory.num_free == owner.count(None)
        for offset in held:
            memory.free(offset)
        assert memory.largest_free == 1 << (num.bit_length() - 1)
