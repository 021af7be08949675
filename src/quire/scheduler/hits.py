"""What of a sequence need not be computed: the longest of

blocks that the index names, on the device, or in host memory if loading takes less time
a pinned prefix, which may end inside a block (pins.py)
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from quire.kv.manager import KVBlocks
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
    return hit if pinned is None or pinned.num_tokens < hit.num_tokens else pinned


def readable(scheduler: "Scheduler", sequence: Sequence) -> tuple[Seq[bytes], int]:
    """Digests of the blocks that a sequence may find in the index, and its length."""
    num_tokens = sequence.num_known_tokens
    if not scheduler.is_indexed(sequence) or not sequence.may_read_cache:
        return (), num_tokens
    num_blocks = num_tokens // scheduler.kv.block_size
    if len(sequence.digests) < num_blocks:
        scheduler.digester([sequence], scheduler.kv.block_size, [num_blocks])
    return sequence.digests, num_tokens


def remaining(scheduler: "Scheduler", sequence: Sequence) -> int:
    """Tokens that a sequence lacks until it samples; prefix hits left out, as of now."""
    if sequence.row >= 0:
        table = scheduler.table
        return int(table.total[sequence.row] - table.computed[sequence.row])
    num_changes = scheduler.kv.num_index_changes + scheduler.pins.num_changes
    if sequence.found_at != num_changes:
        kv, pin = scheduler.kv, scheduler.pins.find(sequence)
        num_tokens = kv.num_computed_blocks(*readable(scheduler, sequence)) * kv.block_size
        if pin is not None:
            num_tokens = max(num_tokens, pin.num_usable(sequence))
        sequence.found_tokens, sequence.found_at = num_tokens, num_changes
    return sequence.num_known_tokens - sequence.found_tokens
