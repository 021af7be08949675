"""Rows that enter a new block: room for them, and names for the blocks that they have filled.

In steady decode a sixteenth of the rows does so in every step, each in the same way. These are
taken together, since a call of their own for each would be most of the time of a step.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from quire.kv.digest import extend_by_one, extend_digests
from quire.scheduler.flight import Blocks, Draft
from quire.scheduler.sequence import Int64, Sequence

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler

Digester = Callable[[Seq[Sequence], int, Seq[int]], None]


def append_blocks(scheduler: "Scheduler", rows: Int64, target: Int64, draft: Draft) -> bool:
    """Give one new block to each of these rows, if none of them needs more than that and nobody has
    to give way; whether that was so. target: [N] tokens that they will have computed."""
    table, capacity = scheduler.table, scheduler.table.capacity[rows]
    if ((table.computed[rows] != capacity) | (target != capacity + 1)).any():
        return False
    blocks = [sequence.blocks for sequence in scheduler.running_at(rows)]
    found = scheduler.kv.append_blocks(blocks, target.tolist())
    if found is None:
        return False
    places = (capacity // scheduler.kv.block_size).tolist()
    draft.writes += zip(repeat(0), rows.tolist(), places, found)
    table.capacity[rows] = capacity + scheduler.kv.block_size
    return True


def index_rows(scheduler: "Scheduler", rows: Int64, draft: Draft, hit: Blocks = ()) -> None:
    """Name the full blocks of known tokens that are computed once this plan has run."""
    table, size = scheduler.table, scheduler.kv.block_size
    num_ready = np.minimum(table.computed[rows], table.known[rows]) // size
    sequences, counts = scheduler.running_at(rows), num_ready.tolist()
    scheduler.digester(sequences, size, counts)
    index = scheduler.kv.index_blocks
    draft.shared += [
        (row, hit, index(sequence.blocks, sequence.digests, num))
        for row, sequence, num in zip(rows.tolist(), sequences, counts, strict=True)
    ]
    table.index_at[rows] = (num_ready + 1) * size


def digest_blocks(sequences: Seq[Sequence], block_size: int, counts: Seq[int]) -> None:
    """Extend the digests of each sequence to its first `count` blocks."""
    lacks_one = (
        len(sequence.digests) == count - 1 and sequence.row >= 0
        for sequence, count in zip(sequences, counts, strict=True)
    )
    if len(sequences) < 2 or not all(lacks_one):
        for sequence, count in zip(sequences, counts, strict=True):
            known = sequence.known_tokens
            extend_digests(sequence.digests, sequence.root, known, block_size, count)
        return
    rows = np.array([sequence.row for sequence in sequences])
    starts = (np.array(counts) - 1) * block_size
    tokens = sequences[0].table.tokens[rows[:, None], starts[:, None] + np.arange(block_size)]
    extend_by_one([s.digests for s in sequences], [s.root for s in sequences], tokens)
