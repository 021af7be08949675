"""Eviction policies: which of the cached blocks that no table holds loses its place first.

A pool keeps these blocks in an `EvictionPolicy`: a dictionary from each block to the number of hits
that it has had, which iterates in the order of eviction. So the standard library's OrderedDict is
the policy `lru`, and costs no Python call. A policy has no clock and no randomness: its order
follows from the calls alone, or a replay would evict other blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from quire.base.errors import ConfigError
from quire.base.plugins import EVICTION_POLICIES as KIND
from quire.base.plugins import load_plugin

FIRST = -1  # a rank before all others


class EvictionPolicy(Protocol):
    """Orders the blocks that the index names and no table holds."""

    def __setitem__(self, block_id: int, num_hits: int, /) -> None:
        """Add a block whose last table has just released it. num_hits: how many sequences have
        begun with it since it got its name."""

    def __delitem__(self, block_id: int, /) -> None:
        """Remove a block: a hit has taken it, or it has lost its name, as by eviction."""

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks, the next one to be evicted first. A pool usually takes only that."""
        ...

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def move_to_end(self, block_id: int, /, last: bool = True) -> None:
        """With `last=False`, which is the only use: let a block be evicted before all others."""


MakeEviction = Callable[[], EvictionPolicy]


class Lfu:
    """Evicts the block with the fewest hits first; of equal ones the least recently used.

    A prefix has at least the hits of what continues it, so leaves go before roots. Without aging,
    popular prompts of the past would stay for ever. So a block's rank is its hits plus the age at
    its release, and the age is the highest rank that was evicted so far (LFU with dynamic aging,
    Arlitt et al. 1999).
    """

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._by_rank: dict[int, OrderedDict[int, None]] = {}
        self._age = 0

    def __setitem__(self, block_id: int, num_hits: int) -> None:
        self._place(block_id, self._age + num_hits)

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
        self._place(block_id, self._age if last else FIRST)
        if not last:
            self._by_rank[FIRST].move_to_end(block_id, last=False)

    def _place(self, block_id: int, rank: int) -> None:
        self._ranks[block_id] = rank
        self._by_rank.setdefault(rank, OrderedDict())[block_id] = None


EVICTION: Mapping[str, MakeEviction] = MappingProxyType({"lru": OrderedDict, "lfu": Lfu})


def make_eviction(name: str) -> MakeEviction:
    """Return what makes the policy of a pool. Raises ConfigError if there is none of this name.

    A policy of another package is tried with two blocks, so that what is wrong with it shows now.
    """
    if name in EVICTION:
        return EVICTION[name]
    found: MakeEviction = load_plugin(KIND, name, EVICTION)
    try:
        seen = _try(found())
    except Exception as error:
        raise ConfigError(
            f"the eviction policy {name!r} cannot be used: {type(error).__name__}: {error}."
        ) from error
    if seen != ([], [8, 5], [5], 1):
        raise ConfigError(
            f"the eviction policy {name!r} cannot be used: a new one must be empty; with blocks 5"
            " and 8 and after `move_to_end(8, last=False)` it must yield 8 and 5, and without 8"
            f" only 5. It gave {seen}."
        )
    return found


def _try(policy: EvictionPolicy) -> tuple[list[int], list[int], list[int], int]:
    """Return what a policy yields when it is new, with two blocks, and with one; and its length."""
    new = list(policy)
    policy[5], policy[8] = 0, 0
    policy.move_to_end(8, last=False)
    both = list(policy)
    del policy[8]
    return new, both, list(policy), len(policy)
