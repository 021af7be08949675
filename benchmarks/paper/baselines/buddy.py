"""A buddy allocator: chunks whose sizes are powers of two, which split in halves and merge again.

P 6.1 assumes that Orca finds the place of a request's keys and values so (Knowlton, A fast storage
allocator, CACM 1965). Sizes are in slots, one token each.
"""


class BuddyAllocator:
    """Memory of any size: the largest chunks are the powers of two that it is the sum of."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}  # offsets, by size
        self._taken: dict[int, int] = {}  # size, by offset
        self._tops: list[tuple[int, int]] = []  # offset and size of the largest chunks
        offset = 0
        for bit in reversed(range(num_slots.bit_length())):
            size = 1 << bit
            if num_slots & size:
                self._tops.append((offset, size))
                self._free.setdefault(size, set()).add(offset)
                offset += size

    @property
    def num_free(self) -> int:
        return sum(size * len(offsets) for size, offsets in self._free.items())

    @property
    def largest_free(self) -> int:
        return max((size for size, offsets in self._free.items() if offsets), default=0)

    @staticmethod
    def rounded(num_slots: int) -> int:
        """Return the size of the chunk that a request for so many slots gets."""
        return 1 << max(0, num_slots - 1).bit_length()

    def allocate(self, num_slots: int) -> int | None:
        """Take a chunk and return its offset; None if none that is free is large enough."""
        chunk = self.rounded(num_slots)
        size = min((s for s, offsets in self._free.items() if offsets and s >= chunk), default=0)
        if not size:
            return None
        offset = min(self._free[size])
        self._free[size].remove(offset)
        while size > chunk:
            size //= 2
            self._free.setdefault(size, set()).add(offset + size)
        self._taken[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Give a chunk back, and merge it with its free buddies."""
        size = self._taken.pop(offset)
        top, top_size = next(t for t in reversed(self._tops) if t[0] <= offset)
        while size < top_size:
            buddy = top + ((offset - top) ^ size)
            if buddy not in self._free.get(size, ()):
                break
            self._free[size].remove(buddy)
            offset, size = min(offset, buddy), 2 * size
        self._free.setdefault(size, set()).add(offset)
