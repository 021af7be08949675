"""Swapping: whole sequences between the device's blocks and the host's (P 4.5)."""

from collections.abc import Iterable, Sequence

from quire.kv.host_tier import Copies
from quire.kv.manager import KVManager, SequenceBlocks, fit
from quire.kv.pool import BlockPool
from quire.kv.table import BlockTable


def undo_copies(
    kv: KVManager,
    sequence: SequenceBlocks,
    copies: Iterable[tuple[int, int, int]],
    num_tokens: int,
) -> None:
    """Take back what a plan in the making has done to a sequence that had this length.

    copies: cache group, from, to; the last first. Their sources are still held by other sequences.
    """
    for group, source, destination in copies:
        pool, table = kv.pools[group], sequence.tables[group]
        table.blocks[table.blocks.index(destination)] = source
        pool.acquire(source)
        pool.release(destination)
    if sequence.num_tokens > num_tokens:
        kv.truncate(sequence, num_tokens)
    sequence.advance(num_tokens)


def swap_out(
    kv: KVManager, sequences: Sequence[SequenceBlocks]
) -> tuple[list[SequenceBlocks], list[Copies]] | None:
    """Give up the device's blocks of these sequences for host blocks, as shared as they were.

    Returns the sequences' tables over host blocks, and by cache group (from, to) of the copies
    that this needs; None if the host has too few blocks.
    """
    needs = kv.num_distinct(sequences)
    if not fit(needs, kv.host_pools):
        return None
    tables, copies = _transfer(kv, sequences, kv.host_pools)
    if kv.tier is not None:
        for g, (_, destination) in enumerate(copies):
            for block_id in destination:
                kv.tier.hold(g, block_id)
    return tables, copies


def swap_in(
    kv: KVManager, sequences: Sequence[SequenceBlocks]
) -> tuple[list[SequenceBlocks], list[Copies]]:
    """Bring them back, as `swap_out` took them; the device must have the blocks."""
    if kv.tier is not None:  # nothing else goes there before it was read
        for g in range(len(kv.pools)):
            for block_id in {b for s in sequences for b in s.tables[g].live_blocks}:
                kv.tier.hold(g, block_id)
    return _transfer(kv, sequences, kv.pools)


def _transfer(
    kv: KVManager, sequences: Sequence[SequenceBlocks], pools: Sequence[BlockPool]
) -> tuple[list[SequenceBlocks], list[Copies]]:
    moved: list[list[BlockTable]] = [[] for _ in sequences]
    copies: list[Copies] = []
    for g, pool in enumerate(pools):
        places: dict[int, int] = {}
        for tables, sequence in zip(moved, sequences, strict=True):
            tables.append(sequence.tables[g].moved_to(pool, places))
        copies.append((list(places), list(places.values())))
    for sequence in sequences:
        kv.free(sequence)
    return [SequenceBlocks(tuple(tables)) for tables in moved], copies
