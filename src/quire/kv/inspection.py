"""Read-only views of pools and tables, for observers and tests."""

from collections.abc import Callable, Iterable

from quire.kv.manager import KVManager, SequenceBlocks
from quire.kv.table import NULL


def host_occupancy(kv: KVManager) -> tuple[int, int, int]:
    """Count the blocks of host memory over all groups, as (all, in use, cached). Cached blocks are
    in the tier's index and have no references."""
    pools = kv.host_pools
    return (
        sum(pool.num_blocks for pool in pools),
        sum(pool.num_used for pool in pools),
        sum(pool.num_cached for pool in pools),
    )


def occupancy(kv: KVManager, g: int) -> tuple[list[int], list[int]]:
    """Return the reference counts of a group's blocks, and the blocks that the index names."""
    return kv.pools[g].all_refs(), kv.pools[g].indexed_blocks()


def num_unindexed(kv: KVManager) -> int:
    """Count how often blocks of the device have lost their names."""
    return sum(pool.num_unindexed for pool in kv.pools)


def check_invariants(
    kv: KVManager,
    sequences: Iterable[SequenceBlocks],
    swapped: Iterable[SequenceBlocks] = (),
    on_order: Callable[[int], list[int]] = lambda g: [],
) -> None:
    """Assert that pools and tables agree. sequences: all sequences that hold device blocks.
    swapped: all sequences that hold host blocks. on_order: returns the host blocks of a group that
    stores read or write."""
    alive, away = list(sequences), list(swapped)
    for g, pool in enumerate(kv.host_pools):
        block_ids = [b for blocks in away for b in blocks.tables[g].live_blocks]
        moving = [] if kv.tier is None else kv.tier.held_blocks(g)
        pool.check_invariants(block_ids + moving + on_order(g))
    for g, pool in enumerate(kv.pools):
        tables = [sequence.tables[g] for sequence in alive]
        lent = [sequence.tables[g] for sequence in alive if sequence.is_evictable]
        block_ids, evictable = ([b for t in each for b in t.live_blocks] for each in (tables, lent))
        pool.check_invariants(block_ids, evictable)
        for table in tables:
            waste = table.capacity - table.num_tokens
            assert 0 <= waste < kv.block_size, "a table holds a block that it does not fill"
            assert NULL not in table.live_blocks, "a live entry is null"
