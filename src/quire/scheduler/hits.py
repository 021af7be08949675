"""What of a sequence need not be computed: the longest of

blocks that the index names, on the device, or in host memory if loading takes less time
a pinned prefix, which may end inside a block (pins.py)

Where both have a full block, the pin's own is taken. The index may name another one of the same
tokens, and to a request that fits only because it shares with the pin that one is of no use.
"""

import dataclasses
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from quire.kv.manager import KVBlocks
from quire.kv.table import NULL
from quire.scheduler.sequence import Sequence
from quire.scheduler.tiers import loading_is_cheaper

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def find_hit(scheduler: "Scheduler", sequence: Sequence) -> KVBlocks:
    """The cached blocks that this sequence may begin with."""
    kv, (digests, num_tokens) = scheduler.kv, readable(scheduler, sequence)
    hit = kv.get_computed_blocks(digests, num_tokens)
    if hit.num_loads:
        near = kv.get_computed_blocks(digests, num_tokens, on_host=False)
        if not loading_is_cheaper(scheduler, hit, near):
            hit = near
    pinned = scheduler.pins.hit(sequence)
    if pinned is None or pinned.num_tokens >= hit.num_tokens:
        return pinned or hit
    return _upon(pinned, hit, pinned.num_tokens // kv.block_size)


def _upon(pinned: KVBlocks, hit: KVBlocks, num_full: int) -> KVBlocks:
    """A hit that goes beyond a pinned prefix of num_full full blocks, with these instead of its
    own."""
    blocks, host = [], []
    for g, mine in enumerate(hit.blocks):
        theirs = pinned.blocks[g][:num_full]
        pairs = zip(theirs, mine, strict=False)
        shared = [own if NULL in (own, block) else block for block, own in pairs]
        blocks.append(shared + mine[num_full:])
        away = hit.host[g] if hit.host else {}
        host.append({i: b for i, b in away.items() if i >= num_full or theirs[i] == NULL})
    return dataclasses.replace(hit, blocks=tuple(blocks), host=tuple(host))


def readable(scheduler: "Scheduler", sequence: Sequence) -> tuple[Seq[bytes], int]:
    """Digests of the blocks that a sequence may find in the index, and of how many tokens all but
    the last may be found."""
    num_tokens = sequence.num_known_tokens
    if not scheduler.is_indexed(sequence) or not sequence.may_read_cache:
        return (), num_tokens
    num_tokens = min(num_tokens, sequence.num_readable_tokens + 1)
    num_blocks = num_tokens // scheduler.kv.block_size
    if len(sequence.digests) < num_blocks:
        scheduler.digester([sequence], scheduler.kv.block_size, [num_blocks])
    return sequence.digests, num_tokens


def remaining(scheduler: "Scheduler", sequence: Sequence) -> int:
    """Tokens that a sequence lacks until it samples; prefix hits left out, as of now."""
    if sequence.row >= 0:
        table = scheduler.table
        return int(table.total[sequence.row] - table.computed[sequence.row])
    kv, pins = scheduler.kv, scheduler.pins
    if sequence.found_at != kv.num_index_changes:
        num_tokens = kv.num_computed_blocks(*readable(scheduler, sequence)) * kv.block_size
        sequence.found_tokens, sequence.found_at = num_tokens, kv.num_index_changes
    if sequence.pinned_at != pins.num_changes:  # which is seldom
        pin = pins.find(sequence)
        sequence.pinned_tokens = 0 if pin is None else pins.num_usable(pin, sequence)
        sequence.pinned_at = pins.num_changes
    return sequence.num_known_tokens - max(sequence.found_tokens, sequence.pinned_tokens)
