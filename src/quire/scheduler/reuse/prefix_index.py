"""The prefix index: hits by name, on the device and in host memory."""

from collections.abc import Sized
from typing import Protocol

from quire.base.messages import MeasuredRates
from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.core.extension import HitSource
from quire.scheduler.core.names import BlockNaming
from quire.scheduler.core.sequence import Sequence


class Rated(Protocol):
    """Owner of the measured rates of prefill and copies."""

    rates: MeasuredRates


class PrefixIndex(HitSource):
    """Hit source of all named blocks, on the device and in host memory."""

    entries: Sized = (True,)  # never empty: a look-up is cheap

    def __init__(self, kv: KVManager, names: BlockNaming, rated: Rated) -> None:
        self._kv, self._names, self._rated = kv, names, rated

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """See HitSource."""
        if best is not None and best.num_tokens == sequence.num_known_tokens - 1:
            return best  # nothing is longer
        kv, (digests, num_tokens) = self._kv, self._names.readable(sequence)
        hit = kv.get_computed_blocks(digests, num_tokens)
        if hit.num_loads:
            near = kv.get_computed_blocks(digests, num_tokens, on_host=False)
            if not loading_is_cheaper(kv, hit, near, self._rated.rates):
                hit = near
        return hit if best is None or hit.num_tokens > best.num_tokens else best

    def num_tokens(self, sequence: Sequence) -> int:
        """See HitSource. Cached until the index changes."""
        kv = self._kv
        if sequence.found_at != kv.num_index_changes:
            num_blocks = kv.num_computed_blocks(*self._names.readable(sequence))
            sequence.found_tokens = num_blocks * kv.block_size
            sequence.found_at = kv.num_index_changes
        return sequence.found_tokens


def loading_is_cheaper(kv: KVManager, hit: KVBlocks, near: KVBlocks, rates: MeasuredRates) -> bool:
    """Return whether loading the host part of a hit is cheaper than computing it. hit: hit with
    host blocks; near: hit on the device only. True if a rate is unknown."""
    sizes = kv.block_bytes
    if not (rates.prefill_tokens_per_s and rates.copy_bytes_per_s and sizes):
        return True
    num_bytes = sum(len(away) * size for away, size in zip(hit.host, sizes, strict=True))
    num_tokens = hit.num_tokens - near.num_tokens
    return num_bytes / rates.copy_bytes_per_s < num_tokens / rates.prefill_tokens_per_s
