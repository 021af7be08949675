"""The block pool: equal blocks of one cache group, reference counted, O(1) (P 4.2).

A block is in exactly one of three states:

    free stack    no references, no name in the index; the last freed block is allocated first
    cached        no references, a name in the index; the eviction policy chooses one of these when
                  the free stack is empty
    in use        held by as many tables as its reference count says; the index may name it

The index maps the digest of a full block of known tokens to the block that holds its K and V.
Invariant (`check_invariants`): the three states partition the blocks, and index and digests are
inverse to each other.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Protocol

MAX_LOST_NAMES = 1 << 14
NAME_REMOVED = b""  # no name


class EvictionPolicy(Protocol):
    """Cached blocks of a pool, mapped to their numbers of hits, iterated in eviction order. An
    OrderedDict is thus LRU and costs no Python call. The order must depend only on the calls, or a
    replay would evict other blocks. Deleting the first block leaves the order of the others."""

    def __setitem__(self, block_id: int, num_hits: int, /) -> None:
        """Add a block that its last table has released. num_hits: sequences that began with the
        block under its present name."""

    def __delitem__(self, block_id: int, /) -> None:
        """Remove a block that a hit has taken or that has lost its name."""

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks in the order of eviction. A pool usually takes only the first."""
        ...

    def __len__(self) -> int:
        """Return the number of blocks."""
        ...

    def move_to_end(self, block_id: int, /, last: bool = True) -> None:
        """Make a block the next to evict; called with `last=False` only."""


MakeEviction = Callable[[], EvictionPolicy]


class BlockPool:
    """Blocks 0 to num_blocks - 1 of one cache group.

    free_order: order in which fresh blocks are allocated. make_eviction: makes the eviction policy
    of cached blocks. num_evictable: blocks in use that only evictable tables hold
    (`mark_evictable`). It is updated with each reference, since counting on demand would visit
    every retained table in each step. evicted: evicted blocks with their digests, for the host
    tier; None without one. lost: the last evicted digests, for miss reports. changes: new names in
    order, and removed names, each after TAKEN; None without a subscriber. The list is flat, because
    the garbage collector would traverse one tuple per name.
    """

    changes: list[bytes] | None = None

    def __init__(
        self,
        num_blocks: int,
        free_order: Sequence[int] | None = None,
        make_eviction: MakeEviction = OrderedDict,
    ) -> None:
        order = range(num_blocks) if free_order is None else free_order
        assert len(order) == len(set(order)) == num_blocks, "the order must name every block once"
        self.num_blocks = num_blocks
        self._free = list(reversed(order))
        self._unused = make_eviction()
        self._num_hits = [0] * num_blocks  # of each block under its present name
        self._evictable_refs = [0] * num_blocks  # references of evictable tables
        self.num_evictable = 0
        self._num_refs = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self.evicted: list[tuple[int, bytes]] | None = None
        self.lost: deque[bytes] = deque(maxlen=MAX_LOST_NAMES)
        self.num_index_changes = 0
        self._num_names_lost = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now: free or cached."""
        return len(self._free) + len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks without references that the index names."""
        return len(self._unused)

    @property
    def num_indexed(self) -> int:
        return len(self._index)

    @property
    def num_unindexed(self) -> int:
        """The number of names removed so far."""
        return (self.num_index_changes - len(self._index)) // 2

    def allocate(self) -> int:
        """Return a free block with one reference. Evicts a block if the free stack is empty."""
        return self.allocate_all(1)[0]

    def allocate_all(self, num: int) -> list[int]:
        """Return this many free blocks with one reference each, as one call of `allocate` for each
        would. There must be enough."""
        free, refs = self._free, self._num_refs
        found = free[: -num - 1 : -1]  # the last ones, beginning with the last
        del free[len(free) - len(found) :]
        if num > len(found):
            chosen = list(islice(self._unused, num - len(found)))
            assert len(chosen) == num - len(found), "more blocks are allocated than are free"
            self._evict(chosen)
            found += chosen
        for block_id in found:
            refs[block_id] = 1
        return found

    def evict(self) -> bool:
        """Free the cached block that the policy chooses; return whether there was one."""
        if not self._unused:
            return False
        block_id = next(iter(self._unused))
        self._evict([block_id])
        self._free.append(block_id)
        return True

    def _evict(self, blocks: list[int]) -> None:
        """Remove the names of cached blocks. Afterwards they are in none of the three states."""
        digests, index, unused = self._digests, self._index, self._unused
        num_names_lost, num_hits = self._num_names_lost, self._num_hits
        names = list[bytes]()
        for block_id in blocks:
            name = digests[block_id]
            assert name is not None, "cached blocks have names"
            names.append(name)
            num_names_lost[block_id] += 1  # first, since other threads read it (`num_names_lost`)
            del index[name]
            digests[block_id] = None
            num_hits[block_id] = 0
            del unused[block_id]
        self.lost += names
        self.num_index_changes += len(names)
        if self.evicted is not None:
            self.evicted += zip(blocks, names, strict=True)
        if self.changes is not None:
            for name in names:
                self.changes += (NAME_REMOVED, name)

    def evict_soon(self, digest: bytes) -> bool:
        """Make the block of this name the next to evict, if it is cached. Return whether it is in
        use instead."""
        block_id = self._index.get(digest)
        is_in_use = block_id is not None and self._num_refs[block_id] > 0
        if block_id is not None and not is_in_use:
            self._unused.move_to_end(block_id, last=False)
        return is_in_use

    def note_hits(self, blocks: Iterable[int]) -> None:
        """Count a hit for each of these blocks; negative entries are ignored."""
        for block_id in blocks:
            if block_id >= 0:
                self._num_hits[block_id] += 1

    def acquire(self, block_id: int) -> None:
        """Add a reference to a block that is in use or cached."""
        self.acquire_all((block_id,))

    def acquire_all(self, blocks: Iterable[int]) -> None:
        """Acquire each of these blocks. A long prompt has thousands."""
        refs, unused, evictable = self._num_refs, self._unused, self._evictable_refs
        for block_id in blocks:
            if refs[block_id] == 0:
                del unused[block_id]
            elif refs[block_id] == evictable[block_id]:
                self.num_evictable -= 1
            refs[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference; the last one frees the block."""
        left = self._num_refs[block_id] - 1
        assert left >= 0, f"block {block_id} was released more often than acquired"
        self._num_refs[block_id] = left
        if left == 0:
            if self._digests[block_id] is None:
                self._free.append(block_id)
            else:
                self._unused[block_id] = self._num_hits[block_id]
        elif left == self._evictable_refs[block_id]:
            self.num_evictable += 1

    def release_all(self, blocks: Iterable[int]) -> None:
        """Release each of these blocks, in this order."""
        refs, evictable, digests = self._num_refs, self._evictable_refs, self._digests
        for block_id in blocks:
            left = refs[block_id] - 1
            if left > 0 and not evictable[block_id]:
                refs[block_id] = left
            elif left == 0 and digests[block_id] is not None:
                refs[block_id] = 0
                self._unused[block_id] = self._num_hits[block_id]
            else:
                self.release(block_id)

    def mark_evictable(self, blocks: Iterable[int]) -> None:
        """Record that a table of these blocks may be freed at any time."""
        for block_id in blocks:
            self._evictable_refs[block_id] += 1
            self.num_evictable += self.is_evictable(block_id)

    def unmark_evictable(self, blocks: Iterable[int]) -> None:
        """Record that a table of these blocks is no longer evictable, or is about to be freed."""
        for block_id in blocks:
            self.num_evictable -= self.is_evictable(block_id)
            self._evictable_refs[block_id] -= 1

    def is_evictable(self, block_id: int) -> bool:
        """Return whether only evictable tables hold a block."""
        return 0 < self._num_refs[block_id] == self._evictable_refs[block_id]

    def num_refs(self, block_id: int) -> int:
        return self._num_refs[block_id]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have no references. Negative entries are ignored."""
        refs = self._num_refs
        return sum([block_id >= 0 and refs[block_id] == 0 for block_id in blocks])

    def is_in_use(self, block_id: int) -> bool:
        """Return whether tables hold this block; False for NULL and LOAD entries."""
        return block_id >= 0 and self._num_refs[block_id] > 0

    def all_refs(self) -> list[int]:
        """Return the reference counts of all blocks."""
        return self._num_refs.copy()

    def indexed_blocks(self) -> list[int]:
        """List the blocks that the index names."""
        return list(self._index.values())

    def is_indexed(self, block_id: int) -> bool:
        return self._digests[block_id] is not None

    def digest_of(self, block_id: int) -> bytes | None:
        """Return the name of a block, or None."""
        return self._digests[block_id]

    def num_names_lost(self, block_id: int) -> int:
        """Return how many names a block has lost. May be called from any thread. Plans write into a
        block only while it has no name."""
        return self._num_names_lost[block_id]

    def lookup(self, digest: bytes) -> int | None:
        """Return the block of this name, or None, without taking a reference."""
        return self._index.get(digest)

    def lookup_all(self, digests: Iterable[bytes]) -> list[int | None]:
        """Look up each of these names."""
        return list(map(self._index.get, digests))

    def num_leading(self, digests: Sequence[bytes], max_num: int) -> int:
        """Return how many leading names, up to max_num, the index has."""
        return len(list(takewhile(self._index.__contains__, islice(digests, max_num))))

    def index(self, block_id: int, digest: bytes) -> None:
        """Name a block in use, unless the digest already names another block."""
        self.index_all((block_id,), (digest,))

    def index_all(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Name each of these blocks in use, unless its digest already names another block."""
        index, digests, refs, changes = self._index, self._digests, self._num_refs, self.changes
        num_before = len(index)
        for block_id, digest in zip(blocks, names, strict=True):
            assert refs[block_id] > 0, f"block {block_id} is indexed while free"
            if digests[block_id] is None and index.setdefault(digest, block_id) == block_id:
                digests[block_id] = digest
                if changes is not None:
                    changes.append(digest)
        self.num_index_changes += len(index) - num_before

    def unindex(self, block_id: int) -> None:
        """Remove the name of a block, if it has one. A cached block becomes free."""
        digest = self._digests[block_id]
        if digest is None:
            return
        self._num_names_lost[block_id] += 1  # first, since other threads read it (`num_names_lost`)
        del self._index[digest]
        self._digests[block_id] = None
        self._num_hits[block_id] = 0
        self.num_index_changes += 1
        if self.changes is not None:
            self.changes += (NAME_REMOVED, digest)
        if self._num_refs[block_id] == 0:
            del self._unused[block_id]
            self._free.append(block_id)

    def forget(self, digest: bytes) -> None:
        """Remove this name, if a block has it."""
        block_id = self._index.get(digest)
        if block_id is not None:
            self.unindex(block_id)

    def reset_index(self) -> None:
        """Remove all names."""
        for block_id in list(self._index.values()):
            self.unindex(block_id)

    def check_invariants(self, block_ids: Iterable[int], evictable: Iterable[int] = ()) -> None:
        """Assert the pool's invariants. block_ids: block ids of all tables, with repetition.
        evictable: block ids of the tables that may be freed at any time, with repetition."""
        counts = self._count(block_ids)
        assert counts == self._num_refs, "reference counts differ from the tables"
        assert self._count(evictable) == self._evictable_refs, "tables are marked otherwise"
        free, unused = set(self._free), set(self._unused)
        assert len(unused) == len(self._unused), "the eviction policy miscounts its blocks"
        assert len(free) == len(self._free), "a block is twice in the free stack"
        assert not free & unused, "a block is both plainly free and indexed"
        used = {block_id for block_id, count in enumerate(counts) if count > 0}
        assert not used & (free | unused), "a block is both free and used"
        assert len(free) + len(unused) + len(used) == self.num_blocks, "a block was lost"
        num_evictable = sum(map(self.is_evictable, range(self.num_blocks)))
        assert num_evictable == self.num_evictable, "the evictable blocks are miscounted"
        named = {b: d for b, d in enumerate(self._digests) if d is not None}
        assert {d: b for b, d in named.items()} == self._index, "index and digests differ"
        assert unused <= named.keys(), "an unnamed block is evictable"
        assert not free & named.keys(), "the index names a plainly free block"

    def _count(self, blocks: Iterable[int]) -> list[int]:
        counts = Counter(blocks)
        return [counts[block_id] for block_id in range(self.num_blocks)]
