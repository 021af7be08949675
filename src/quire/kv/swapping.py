"""Swapping of whole sequences between blocks of the device and of the host (P 4.5)."""

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
    """Undo the changes of a plan being made to a sequence of num_tokens tokens. copies: (cache
    group, source, destination), last first; other sequences still hold the sources."""
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
    """Exchange the device blocks of these sequences for host blocks, and preserve sharing.

    Return the sequences' tables over host blocks and the copies by cache group, as (sources,
    destinations). Return None if the host has too few blocks.
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
    """Move what `swap_out` returned back to the device, which must have enough blocks."""
    if kv.tier is not None:  # other data must not replace the host blocks before they are read
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
        moved_blocks: dict[int, int] = {}
        for tables, sequence in zip(moved, sequences, strict=True):
            tables.append(sequence.tables[g].moved_to(pool, moved_blocks))
        copies.append((list(moved_blocks), list(moved_blocks.values())))
    for sequence in sequences:
        kv.free(sequence)
    return [SequenceBlocks(tuple(tables)) for tables in moved], copies
