"""LFU with dynamic aging (Arlitt et al. 1999): the cached block with the lowest rank is evicted
first.

    rank = age at the block's release + its hits
    age  = highest rank of a removed block that had the lowest rank at its removal

Without the age, popular prompts of the past would stay for ever. Among blocks of equal rank, the
least recently used is evicted first. A prefix has at least as many hits as its continuations, so
leaves are evicted before roots.
"""

from collections import OrderedDict
from collections.abc import Iterator

FIRST = -1  # rank below all others


class Lfu:
    """Eviction policy by hits and age; see EvictionPolicy."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._by_rank: dict[int, OrderedDict[int, None]] = {}
        self._age = 0

    def __setitem__(self, block_id: int, num_hits: int) -> None:
        self._add(block_id, self._age + num_hits)

    def __delitem__(self, block_id: int) -> None:
        rank = self._ranks.pop(block_id)
        if rank == min(self._by_rank):
            self._age = max(self._age, rank)
        del self._by_rank[rank][block_id]
        if not self._by_rank[rank]:
            del self._by_rank[rank]

    def __iter__(self) -> Iterator[int]:
        for rank in sorted(self._by_rank):
            yield from self._by_rank[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def move_to_end(self, block_id: int, last: bool = True) -> None:
        """See EvictionPolicy."""
        del self[block_id]
        self._add(block_id, self._age if last else FIRST)
        if not last:
            self._by_rank[FIRST].move_to_end(block_id, last=False)

    def _add(self, block_id: int, rank: int) -> None:
        self._ranks[block_id] = rank
        self._by_rank.setdefault(rank, OrderedDict())[block_id] = None
