"""Last blocks of ended sequences that are not full, found by name like full blocks.

    first turn   | block 0 | block 1 | blo      |     its last block has 3 tokens
    next turn    | block 0 | block 1 | blo ck 2 | ...  begins with these 3 tokens, too

Full blocks alone lose half a block in each turn of a conversation, which is 1 % of a context of 800
tokens. So the last block of a sequence gets a name when the sequence ends: the digest of the
block before it and of its tokens. From then on it is an ordinary cached block, which host memory
and stores keep. The sequence that begins with it writes on in place, or copies it if others hold
it (`BlockTable.append`).

The lengths of named partial blocks are remembered by the name of the block before them, since a
look-up must know which names to compute. They are forgotten at the end of the process, so a partial
block in a store is found only by the engine that named it. Sequences with media or with siblings
have no such names.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from quire.kv.host_tier import Name
from quire.kv.manager import LOAD, KVBlocks
from quire.scheduler.core.extension import Extension, HitSource
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.reuse.held import num_sure

MAX_REMEMBERED = 1 << 14  # blocks before partial ones
COMPLETE = ("stop", "length")  # ends after which all tokens but the last may be computed


class PartialBlocks(HitSource, Extension):
    """Hit source of partial blocks. It makes the hits of the prefix index longer, so it is attached
    after that."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._kv, self._names = memory, memory.kv, memory.names
        # By the name of the block before: the lengths of partial blocks, as bits
        self._lengths = OrderedDict[bytes, int]()
        self.entries = self._lengths

    # ---- naming ------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, now: float) -> None:
        """See Extension: follow all sequences whose last block may get a name."""
        if not sequence.marks and sequence.group is None:
            sequence.watch(self)

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """See Extension: name the last block of a sequence that ends with a result, if all its
        tokens but the last are computed."""
        num_computed = sequence.num_known_tokens - 1
        num_blocks, length = divmod(num_computed, self._kv.block_size)
        is_computed = num_sure(sequence) == num_computed and reason in COMPLETE
        if not is_computed or not num_blocks or sequence.is_renamed:
            return
        if sequence.blocks.num_indexed < num_blocks:
            self._memory.name_full_blocks([sequence], [num_blocks])
        if length:
            self._name(sequence, num_blocks, length)

    def _name(self, sequence: Sequence, num_blocks: int, length: int) -> None:
        """Name the block of `length` tokens after the full blocks of a sequence. Steps in flight
        may already have begun the next chunk of a group; its block is then dropped."""
        self._names.extend([sequence], [num_blocks])
        name = self._names.of_partial(sequence, num_blocks, length)
        if not self._kv.index_block(sequence.blocks, num_blocks, name):
            return
        before = sequence.digests[num_blocks - 1]
        self._lengths[before] = self._lengths.get(before, 0) | 1 << length
        self._lengths.move_to_end(before)
        if len(self._lengths) > MAX_REMEMBERED:
            self._lengths.popitem(last=False)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """See Extension: the blocks that these sequences began with may be wrong."""
        for sequence in failed:
            for member in sequence.members:
                self._kv.forget(self.names_in(member))

    # ---- finding -----------------------------------------------------------------------------

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """See HitSource: add the longest partial block that continues a hit of full blocks."""
        size = self._kv.block_size
        if best is None or best.source or best.is_in_use or best.num_tokens % size:
            return best
        num_blocks = best.num_tokens // size
        for length, name in self._names_after(sequence, num_blocks):
            if all(self._kv.is_cached(g, name) for g in range(len(self._kv.groups))):
                return self._with_block(best, name, length)
        return best

    def names_in(self, sequence: Sequence) -> list[bytes]:
        """Return the names of all partial blocks that a sequence may have begun with."""
        blocks = range(1, len(sequence.digests) + 1)
        return [name for i in blocks for _, name in self._names_after(sequence, i)]

    def to_fetch(self, sequence: Sequence, num_blocks: int) -> list[list[Name]]:
        """Return the cache groups and names of each partial block after this many full ones that
        are not cached here, the longest first. End with one that is here."""
        kv, found = self._kv, []
        for _, name in self._names_after(sequence, num_blocks):
            found.append([(g, name) for g in range(len(kv.groups)) if not kv.is_cached(g, name)])
            if not found[-1]:
                break
        return found

    def num_blocks_before(self, sequence: Sequence) -> int:
        """Return the number of full blocks before the last known partial block of a prompt; 0 for
        none."""
        digests, _ = self._names.readable(sequence)
        known = (i for i in range(len(digests), 0, -1) if digests[i - 1] in self._lengths)
        return next(known, 0)

    def _names_after(self, sequence: Sequence, num_blocks: int) -> Iterator[tuple[int, bytes]]:
        """Yield the lengths and names of known partial blocks after this many full blocks, if the
        sequence is longer. The longest is first."""
        digests, num_tokens = self._names.readable(sequence)
        if not 0 < num_blocks <= len(digests) or sequence.marks:
            return
        lengths = self._lengths.get(digests[num_blocks - 1], 0)
        room = num_tokens - 1 - num_blocks * self._kv.block_size
        for length in range(min(lengths.bit_length() - 1, room), 0, -1):
            if lengths >> length & 1:
                yield length, self._names.of_partial(sequence, num_blocks, length)

    def _with_block(self, hit: KVBlocks, name: bytes, length: int) -> KVBlocks:
        """Return a hit of full blocks with this partial block after them."""
        kv, blocks, host = self._kv, [], []
        for g, mine in enumerate(hit.blocks):
            block, loads = kv.device_block(g, name), dict(hit.host[g])
            if block is None:
                away = None if kv.tier is None else kv.tier.lookup(g, name)
                assert away is not None, "a hit must be cached"
                loads[len(mine)] = away
            blocks.append([*mine, LOAD if block is None else block])
            host.append(loads)
        num_tokens = hit.num_tokens + length
        return hit.replace(num_tokens=num_tokens, blocks=tuple(blocks), host=tuple(host))
