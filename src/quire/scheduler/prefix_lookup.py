"""What of a sequence need not be computed: the longest of

blocks that the index names, on the device, or in host memory if loading takes less time
a pinned prefix, which may end inside a block (pinned.py)
what it was forked from, which may end inside a block, too (held.py)

Where both have a full block, the pin's own is taken. The index may name another one of the same
tokens, and to a request that fits only because it shares with the pin that one is of no use.
"""

import dataclasses

from quire.base.messages import MeasuredRates
from quire.kv.manager import KVBlocks, KVManager
from quire.kv.table import NULL
from quire.scheduler.block_naming import BlockNaming
from quire.scheduler.held import Holds
from quire.scheduler.pinned import PinnedPrefixes
from quire.scheduler.sequence import Sequence


class PrefixLookup:
    """Finds what a sequence may begin with. Changes nothing but what sequences know of it."""

    def __init__(
        self, kv: KVManager, names: BlockNaming, pinned: PinnedPrefixes, held: Holds
    ) -> None:
        self._kv, self._names, self._pinned, self._held = kv, names, pinned, held

    def find(self, sequence: Sequence, rates: MeasuredRates) -> KVBlocks:
        """Find the cached blocks that this sequence may begin with. rates: tell whether loading
        what host memory has takes less time than computing it."""
        held = self._held.hit(sequence)
        if held is not None and held.num_tokens == sequence.num_known_tokens - 1:
            return held  # nothing is longer
        hit = self._find_named(sequence, rates)
        return hit if held is None or held.num_tokens < hit.num_tokens else held

    def _find_named(self, sequence: Sequence, rates: MeasuredRates) -> KVBlocks:
        """Find what its tokens are found by."""
        kv, (digests, num_tokens) = self._kv, self._names.readable(sequence)
        hit = kv.get_computed_blocks(digests, num_tokens)
        if hit.num_loads:
            near = kv.get_computed_blocks(digests, num_tokens, on_host=False)
            if not self._loading_is_cheaper(hit, near, rates):
                hit = near
        pinned = self._pinned.hit(sequence)
        if pinned is None or pinned.num_tokens >= hit.num_tokens:
            return pinned or hit
        return _upon(pinned, hit, pinned.num_tokens // kv.block_size)

    def num_found_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a hit, whatever it costs to load; looked up once a change."""
        kv = self._kv
        if sequence.found_at != kv.num_index_changes:
            num_blocks = kv.num_computed_blocks(*self._names.readable(sequence))
            sequence.found_tokens = num_blocks * kv.block_size
            sequence.found_at = kv.num_index_changes
        held = self._held.num_usable_tokens(sequence)
        return max(sequence.found_tokens, self._pinned.num_usable_tokens(sequence), held)

    def _loading_is_cheaper(self, hit: KVBlocks, near: KVBlocks, rates: MeasuredRates) -> bool:
        """Tell whether to load what host memory has beyond the hit on the device. Where a rate is
        not known, it is loaded."""
        sizes = self._kv.block_bytes
        if not (rates.prefill_tokens_per_s and rates.copy_bytes_per_s and sizes):
            return True
        num_bytes = sum(len(away) * size for away, size in zip(hit.host, sizes, strict=True))
        num_tokens = hit.num_tokens - near.num_tokens
        return num_bytes / rates.copy_bytes_per_s < num_tokens / rates.prefill_tokens_per_s


def _upon(pinned: KVBlocks, hit: KVBlocks, num_full: int) -> KVBlocks:
    """Return a hit that goes beyond a pinned prefix, with the prefix's num_full full blocks in the
    place of its own."""
    blocks, host = [], []
    for g, mine in enumerate(hit.blocks):
        theirs = pinned.blocks[g][:num_full]
        pairs = zip(theirs, mine, strict=False)
        shared = [own if NULL in (own, block) else block for block, own in pairs]
        blocks.append(shared + mine[num_full:])
        away = hit.host[g] if hit.host else {}
        host.append({i: b for i, b in away.items() if i >= num_full or theirs[i] == NULL})
    return dataclasses.replace(hit, blocks=tuple(blocks), host=tuple(host))
