"""The KV manager: the blocks of all cache groups together (T 4.2.2, listing 4.2).

A sequence has one block table per cache group. All groups grow together or not at all. A prefix hit
is a number of leading blocks, equal for all groups. Of these blocks, a group's index needs only the
ones for the next token (spec/cache_group.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from quire.base.plan import FrozenRecord
from quire.kv.host_tier import Copies, HostTier
from quire.kv.pool import BlockPool, MakeEviction
from quire.kv.state_table import StateTable
from quire.kv.states import States
from quire.kv.table import NULL, Appended, BlockTable
from quire.spec.cache_group import STATE, CacheGroup


class KVBlocks(FrozenRecord, frozen=True):
    """A prefix hit: leading tokens that need not be computed, and their blocks by group.

    blocks: device blocks by group; LOAD stands for a block in host memory. host: by group, host
    blocks to load by logical index. source: feature that holds the blocks, whose last one may be
    partly full; empty for the index. is_in_use: whether tables hold all of the blocks, so that none
    must be loaded.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    host: tuple[dict[int, int], ...] = ()
    source: str = ""
    is_in_use: bool = False

    @property
    def num_loads(self) -> int:
        """The number of blocks to load, over all groups."""
        return sum([len(found) for found in self.host]) if self.host else 0


LOAD = -2
Has = Callable[[int, bytes], bool]  # whether a cache group has the block of a digest


class SequenceBlocks:
    """The block tables of one sequence. num_indexed: leading blocks that are in the index.
    is_evictable: whether the tables may be freed at any time (`KVManager.set_evictable`)."""

    __slots__ = ("tables", "num_indexed", "is_evictable")

    def __init__(self, tables: tuple[BlockTable, ...]) -> None:
        self.tables = tables
        self.num_indexed = 0
        self.is_evictable = False

    @property
    def num_tokens(self) -> int:
        return self.tables[0].num_tokens

    @property
    def capacity(self) -> int:
        return self.tables[0].capacity

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were written into blocks already held."""
        for table in self.tables:
            assert table.num_tokens <= num_tokens <= table.capacity, "advanced over the last block"
            table.num_tokens = num_tokens


class KVManager:
    """Bookkeeping of all KV blocks of a model.

    groups, num_blocks: cache groups, and the size of each group's pool. free_orders: order in which
    each pool allocates fresh blocks, for tests. host_limits: maximum number of evicted blocks of
    each group in host memory; None for no host tier. make_eviction: makes the eviction policy of
    each pool.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        enable_prefix_caching: bool = True,
        free_orders: Sequence[Sequence[int]] | None = None,
        block_bytes: Sequence[int] = (),
        host_limits: Sequence[int] | None = None,
        make_eviction: MakeEviction = OrderedDict,
    ) -> None:
        orders: Sequence[Sequence[int] | None] = free_orders or [None] * len(groups)
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        pairs = zip(num_blocks, orders, strict=True)
        self.pools = tuple(BlockPool(n, o, make_eviction) for n, o in pairs)
        # Swap space is as large as the device's pools, so it is never too small (P 4.5).
        limits = [0] * len(groups) if host_limits is None else host_limits
        sizes = [max(pair) for pair in zip(num_blocks, limits, strict=True)]
        self.host_pools = tuple(BlockPool(n, None, make_eviction) for n in sizes)
        self.tier = None if host_limits is None else HostTier(self.pools, self.host_pools, limits)
        self.loads: list[Copies] = []  # loads of the plan being made, by group
        self.block_bytes = tuple(block_bytes)
        self.states = States(groups, self.pools)
        self.has_states = len(self.states.groups) > 0  # whether there are `state` groups
        # Groups that drop blocks while a sequence grows
        self._dropping = tuple(g for g, group in enumerate(groups) if not group.keeps_all)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the largest pool."""
        return max(pool.num_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks of the pool with the least free blocks."""
        return min(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """The share of blocks that sequences hold, in the fullest pool."""
        return max(pool.num_used / pool.num_blocks for pool in self.pools)

    @property
    def num_index_changes(self) -> int:
        """The number of index changes; each may have changed the hits of waiting sequences."""
        pools = self.pools if self.tier is None else (*self.pools, *self.host_pools)
        return sum(pool.num_index_changes for pool in pools)

    def new_sequence(self) -> SequenceBlocks:
        size, pools, tables = self.block_size, self.pools, list[BlockTable]()
        for g, group in enumerate(self.groups):
            tables.append((StateTable if group.kind == STATE else BlockTable)(pools[g], size))
        return SequenceBlocks(tuple(tables))

    def group_blocks(
        self, num_tokens: int, num_shared: int, num_sequences: int, chunk: int
    ) -> list[int]:
        """Return the maximum number of blocks, by cache group, that sequences of this length hold
        together. num_shared: full blocks that all of them share. chunk: maximum number of tokens
        per step over all of them, so a window group needs the blocks of a chunk only once."""
        blocks = -(-num_tokens // self.block_size)
        needs = [num_shared + num_sequences * (blocks - num_shared)] * len(self.groups)
        for g in self._dropping:
            group = self.groups[g]
            alone = group.max_blocks(num_tokens, self.block_size, chunk)
            decoding = group.max_blocks(num_tokens, self.block_size)
            others = (num_sequences - 1) * decoding
            if group.kind != STATE:
                # Each other sequence may begin a block for its part of the chunk.
                others = min(others + num_sequences - 1, (num_sequences - 1) * alone)
            needs[g] = alone + others
        return needs

    def get_computed_blocks(
        self, digests: Sequence[bytes], num_tokens: int, on_host: bool = True
    ) -> KVBlocks:
        """Return the longest usable prefix hit, without taking references.

        digests: names of the sequence's full blocks. num_tokens: length of the sequence; at least
        one token remains to be computed. on_host: whether to include blocks in host memory.
        """
        has = None if on_host else self._is_on_device
        length = self.num_computed_blocks(digests, num_tokens, has)
        if not length:
            return KVBlocks(0, tuple([[] for _ in self.groups]))
        found = [self._hit_blocks(g, digests, length) for g in range(len(self.groups))]
        blocks, host = tuple(mine for mine, _ in found), tuple(away for _, away in found)
        return KVBlocks(length * self.block_size, blocks, host)

    def num_computed_blocks(
        self, digests: Sequence[bytes], num_tokens: int, has: Has | None = None
    ) -> int:
        """Return the number of blocks of the longest usable hit. has: whether a block is available;
        by default on the device or in host memory."""
        length = min(len(digests), (num_tokens - 1) // self.block_size)
        settled = length <= 0
        while not settled:
            before = length
            for g in range(len(self.groups)):
                length = self._hit_length(g, digests, length, has)
            settled = length in (0, before) or len(self.groups) == 1
        return max(0, length)

    def fits(self, needs: Sequence[int], reserve: int = 0) -> bool:
        """Return whether each pool has at least `reserve` more free blocks than its group needs."""
        return fit(needs, self.pools, reserve)

    def needs_with_hit(self, num_tokens: int, hit: KVBlocks, chunk: int) -> list[int]:
        """Return the number of free blocks, by cache group, that a sequence with a prefix hit
        needs. num_tokens: length of the sequence, which is computed in chunks."""
        needs = [-(-num_tokens // self.block_size)] * len(self.groups)
        if hit.num_tokens:
            for g, blocks in enumerate(hit.blocks):
                needs[g] += self._num_taken_blocks(g, hit) - len(blocks)
        for g in self._dropping:
            # The hit's blocks are included in the maximum that the sequence ever holds.
            max_blocks = self.groups[g].max_blocks(num_tokens, self.block_size, chunk)
            needs[g] = min(needs[g], max_blocks)
        return needs

    def allocate_slots(
        self,
        sequence: SequenceBlocks,
        num_new_tokens: int,
        computed: KVBlocks | None = None,
        num_unsure: int = 0,
    ) -> tuple[Appended, ...] | None:
        """Allocate blocks for the next tokens. Return the changes by group, or None if a pool has
        too few blocks.

        computed: the prefix hit with which a sequence without blocks begins. num_unsure: last
        tokens that may be rejected; blocks needed by the tokens before them are not dropped.
        """
        start = sequence.num_tokens if computed is None else computed.num_tokens
        for g in self._dropping:
            needed = self.groups[g].first_needed(start - num_unsure)
            sequence.tables[g].drop_before(needed)
        if computed is not None and computed.num_tokens:
            needs = [
                table.num_blocks_from(len(computed.blocks[g]), start + num_new_tokens)
                + self._num_taken_blocks(g, computed)
                for g, table in enumerate(sequence.tables)
            ]
            if not self.fits(needs):
                return None
            self._adopt(sequence, computed)
        if not self.fits([table.num_new_blocks(num_new_tokens) for table in sequence.tables]):
            return None
        if self.states.groups:
            self.states.grow(sequence.tables, start + num_new_tokens)
        return tuple([table.append(num_new_tokens) for table in sequence.tables])

    def append_drafts(
        self, sequence: SequenceBlocks, num_tokens: int, num_draft_tokens: int, reserve: int = 0
    ) -> tuple[Appended, ...] | None:
        """Allocate blocks for draft tokens after num_tokens, like `allocate_slots`. Keeps `reserve`
        blocks of each group free. Drops no blocks, since drafts may be rejected."""
        sequence.advance(num_tokens)
        needs = [table.num_draft_blocks(num_draft_tokens) for table in sequence.tables]
        if not self.fits(needs, reserve):
            return None
        return tuple(table.append_drafts(num_draft_tokens) for table in sequence.tables)

    def _num_taken_blocks(self, g: int, hit: KVBlocks) -> int:
        """Return the number of free blocks of group g that a hit takes. These are cached blocks,
        blocks to load, and the copy of a last block that is not full."""
        pool = self.pools[g]
        copied = hit.num_tokens % self.block_size > 0 and pool.is_in_use(hit.blocks[g][-1])
        if hit.is_in_use:
            return int(copied)
        return hit.blocks[g].count(LOAD) + pool.num_idle(hit.blocks[g]) + copied

    def _adopt(self, sequence: SequenceBlocks, hit: KVBlocks) -> None:
        """Begin with the blocks of a hit. Blocks to load get device blocks and enter the index at
        once, because a plan loads before its forward pass."""
        for pool, blocks in zip(self.pools, hit.blocks, strict=True):
            pool.note_hits(blocks)
        for pool, away in zip(self.host_pools, hit.host, strict=False):
            pool.note_hits(away.values())
        if not hit.num_loads:
            for table, found in zip(sequence.tables, hit.blocks, strict=True):
                table.adopt(found, hit.num_tokens)
        else:
            for pool, blocks in zip(self.pools, hit.blocks, strict=True):
                pool.acquire_all([b for b in blocks if b >= 0])  # so that loads cannot evict them
            for g, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True)):
                blocks = list(hit.blocks[g])
                for i, host_block in hit.host[g].items() if hit.host else ():
                    blocks[i] = self._load(g, host_block)
                table.adopt(blocks, hit.num_tokens)
                pool.release_all([b for b in blocks if b != NULL])
        sequence.num_indexed = hit.num_tokens // self.block_size
        if self.states.groups and hit.num_tokens:
            self.states.begin(sequence.tables)

    def _load(self, g: int, host_block: int) -> int:
        """Allocate a device block into which the plan being made loads a host block."""
        assert self.tier is not None, "there is no host tier"
        digest = self.host_pools[g].digest_of(host_block)
        assert digest is not None, "a hit must be cached"
        self.tier.hold(g, host_block)
        self.tier.num_loaded += 1
        block_id = self.pools[g].allocate()
        self.pools[g].index(block_id, digest)
        if not self.loads:
            self.loads = [([], []) for _ in self.pools]
        source, destination = self.loads[g]
        source.append(host_block)
        destination.append(block_id)
        return block_id

    def take_loads(self) -> list[Copies]:
        """Return the loads of the last hit, by cache group, and clear them."""
        found, self.loads = self.loads, []
        return found

    def append_blocks(
        self, sequences: Sequence[SequenceBlocks], num_tokens: list[int]
    ) -> list[int] | None:
        """Allocate one new block for each of these sequences, whose blocks are full; return them.

        num_tokens: lengths including the next token. Changes nothing and returns None if there are
        several cache groups, a window or too few blocks.
        """
        pool, size = self.pools[0], self.block_size
        if len(self.pools) > 1 or self._dropping or pool.num_free < len(sequences):
            return None
        tables = [sequence.tables[0] for sequence in sequences]
        if [len(table.blocks) * size + 1 for table in tables] != num_tokens:
            return None
        found = pool.allocate_all(len(tables))
        for table, length, block_id in zip(tables, num_tokens, found, strict=True):
            table.blocks.append(block_id)
            table.num_tokens = length
        return found

    def num_free_slots(self, sequence: SequenceBlocks) -> int:
        """Return the number of tokens that all free blocks would add to a sequence."""
        return min(
            table.num_free_slots(pool.num_free)
            for table, pool in zip(sequence.tables, self.pools, strict=True)
        )

    def index_blocks(
        self, sequence: SequenceBlocks, digests: Sequence[bytes], num: int
    ) -> list[list[int]]:
        """Name a sequence's full blocks up to `num`. Return the newly named blocks by group."""
        first, sequence.num_indexed = sequence.num_indexed, num
        new, tables = digests[first:num], sequence.tables
        named = [table.name(first, new) for table in tables]
        if self.states.groups:
            self.states.name(tables, named, first, new)
        return named

    def index_block(self, sequence: SequenceBlocks, index: int, digest: bytes) -> bool:
        """Name one block of a sequence in all groups, by its logical index. If a group has dropped
        it, name nothing and return False."""
        blocks = [table.blocks[index] for table in sequence.tables]
        if NULL in blocks:
            return False
        for pool, block_id in zip(self.pools, blocks, strict=True):
            pool.index(block_id, digest)
        return True

    def unindex_blocks(self, named: Sequence[Iterable[int]]) -> None:
        """Remove the names of blocks, by group, whose contents may be wrong."""
        for pool, blocks in zip(self.pools, named, strict=True):
            for block_id in blocks:
                pool.unindex(block_id)

    def fork(self, parent: SequenceBlocks) -> SequenceBlocks:
        child = SequenceBlocks(tuple(table.fork() for table in parent.tables))
        child.num_indexed = parent.num_indexed
        return child

    def truncate(self, sequence: SequenceBlocks, num_tokens: int) -> None:
        was_evictable = sequence.is_evictable
        self.set_evictable(sequence, False)
        for table in sequence.tables:
            table.truncate(num_tokens)
        self.set_evictable(sequence, was_evictable)
        sequence.num_indexed = min(sequence.num_indexed, num_tokens // self.block_size)

    def num_distinct(self, sequences: Iterable[SequenceBlocks]) -> list[int]:
        """Return the number of different blocks, by cache group, that these sequences hold."""
        tables = [sequence.tables for sequence in sequences]
        return [
            len({block_id for mine in tables for block_id in mine[g].live_blocks})
            for g in range(len(self.groups))
        ]

    def set_evictable(self, sequence: SequenceBlocks, is_evictable: bool) -> None:
        """Set whether these tables may be freed at any time to make room."""
        if sequence.is_evictable != is_evictable:
            sequence.is_evictable = is_evictable
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                mark = pool.mark_evictable if is_evictable else pool.unmark_evictable
                mark(table.live_blocks)

    def num_evictable(self, but: Sequence[Sequence[int]] = ()) -> list[int]:
        """Return the number of blocks, by cache group, that become free if all evictable tables are
        freed. but: blocks, by cache group, that do not count."""
        found = [pool.num_evictable for pool in self.pools]
        for g, blocks in enumerate(but):
            found[g] -= sum(map(self.pools[g].is_evictable, {b for b in blocks if b >= 0}))
        return found

    def free(self, sequence: SequenceBlocks) -> None:
        if sequence.is_evictable:
            self.set_evictable(sequence, False)
        for table in sequence.tables:
            table.free()
        sequence.num_indexed = 0
        if self.states.groups:
            self.states.free(sequence.tables)

    def reset_prefix_cache(self) -> None:
        for pool in self.pools:
            pool.reset_index()
        if self.tier is not None:
            self.tier.reset()

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove these names on the device and in host memory; the contents may be wrong."""
        for pool in (*self.pools, *self.host_pools):
            for digest in digests:
                pool.forget(digest)

    def evict_soon(self, digests: Iterable[bytes]) -> list[bytes]:
        """Make the cached blocks of these names the next to evict, the last one first. States have
        an order of their own. Return the names whose host blocks are in use."""
        kept = [g for g, group in enumerate(self.groups) if group.kind != STATE]
        in_use = []
        for digest in digests:
            for g in kept:
                self.pools[g].evict_soon(digest)
            are_in_use = [self.host_pools[g].evict_soon(digest) for g in kept]
            if any(are_in_use):
                in_use.append(digest)
        return in_use

    def _is_on_device(self, g: int, digest: bytes) -> bool:
        block_id = self.pools[g].lookup(digest)
        return block_id is not None and block_id not in self.states.unwritten[g]

    def device_block(self, g: int, digest: bytes) -> int | None:
        """Return the device block of this name, or None, without taking a reference."""
        return self.pools[g].lookup(digest)

    def is_cached(self, g: int, digest: bytes) -> bool:
        """Return whether a block is on the device or in host memory."""
        if self._is_on_device(g, digest):
            return True
        return self.tier is not None and self.tier.lookup(g, digest) is not None

    def _hit_length(
        self, g: int, digests: Sequence[bytes], max_blocks: int, has: Has | None
    ) -> int:
        """Return the number of leading blocks, up to `max_blocks`, with which group g can
        continue."""
        if g not in self._dropping:
            first = self.pools[g].num_leading(digests, max_blocks) if has is None else 0
            if has is None and self.tier is None:
                return first  # nothing is anywhere else
            there = has or self.is_cached
            for i in range(first, max_blocks):
                if not there(g, digests[i]):
                    return i
            return max_blocks
        length = max_blocks
        while length > 0:
            missing = self._last_missing(g, digests, length, has or self.is_cached)
            if missing is None:
                return length
            length = missing
        return 0

    def _last_missing(self, g: int, digests: Sequence[bytes], length: int, has: Has) -> int | None:
        """Return the last missing block that the token after `length` blocks needs, or None."""
        for i in range(length - 1, self.first_seen(g, length * self.block_size) - 1, -1):
            if not has(g, digests[i]):
                return i
        return None

    def first_seen(self, g: int, num_tokens: int) -> int:
        """Return the first logical block that the token after num_tokens needs."""
        if g not in self._dropping:
            return 0
        return self.groups[g].first_needed(num_tokens) // self.block_size

    def _hit_blocks(
        self, g: int, digests: Sequence[bytes], length: int
    ) -> tuple[list[int], dict[int, int]]:
        """Return the device blocks of a hit, and the host blocks to load by logical index."""
        first, host = self.first_seen(g, length * self.block_size), dict[int, int]()
        blocks, known = [NULL] * first, self.pools[g].lookup_all(digests[first:length])
        if None not in known:
            return blocks + [block for block in known if block is not None], host
        for i, found in enumerate(known, first):
            if found is None:
                away = None if self.tier is None else self.tier.lookup(g, digests[i])
                assert away is not None, "a hit must be cached"
                host[i] = away
            blocks.append(LOAD if found is None else found)
        return blocks, host


def fit(needs: Sequence[int], pools: Sequence[BlockPool], reserve: int = 0) -> bool:
    """Return whether each pool has at least `reserve` more free blocks than its group needs."""
    for g, pool in enumerate(pools):  # noqa: SIM110 (a generator takes twice as long)
        if needs[g] + reserve > pool.num_free:
            return False
    return True
