"""Blocks of pinned prefixes, the requests that begin with them, and the blocks reserved for them.

    pinned    | block 0 | block 1 | blo      |        prefix of 2 blocks and 3 tokens
    request   | block 0 | block 1 | blo ck 2 | ...    its own copy of the last block

A request that begins with a pinned prefix forks it. Full blocks are shared. If the last block is
not full, a request copies it before its first write (copy-on-write). Pinned blocks are referenced,
so they are never evicted. A prefix is identified by the digest of all its tokens. It has the same
root as block digests, so salts separate tenants here, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from quire.base.messages import PinnedPrefix, Request
from quire.kv.manager import KVBlocks, SequenceBlocks
from quire.kv.table import NULL
from quire.scheduler.core.extension import HitSource
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.sequence import Sequence


class Source(StrEnum):
    """Name of this source in the report of a hit."""

    PINNED = "pinned"


@dataclass(eq=False, slots=True)
class Pin:
    """Pinned prefix. sequence: computes the prefix; None once it is complete. blocks: its tables
    from then on. max_blocks: maximum blocks by cache group. digest: digest of all its tokens.
    num_own_hits: hits of its own tenant, which must not learn about others."""

    request: Request
    sequence: Sequence | None
    max_blocks: list[int]
    since_s: float
    digest: bytes = b""
    blocks: SequenceBlocks | None = None
    ends_s: float = math.inf
    num_hits: int = 0
    num_own_hits: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class PinnedPrefixes(HitSource):
    """Hit source of all pinned prefixes. by_id: pins by request id. reserved: blocks, by cache
    group, that the pins have or will have. num_changes: number of changes; hits found before the
    last change may be outdated.

    If the index has a longer hit, the full blocks of a pin replace the index's blocks in it. The
    index may name other blocks with the same tokens. These do not help a request that only fits
    because it shares the pin's blocks.
    """

    def __init__(self, memory: Memory) -> None:
        self.by_id: dict[str, Pin] = {}
        self.entries = self.ready = list[Pin]()  # complete pins, longest first
        self.reserved = [0] * len(memory.kv.groups)
        self.num_hits = self.num_hit_tokens = 0
        self.num_changes = 0
        self._memory, self._kv, self._names = memory, memory.kv, memory.names

    @property
    def computing(self) -> list[Pin]:
        """Pins that a sequence still computes."""
        if len(self.by_id) == len(self.ready):
            return []
        return [pin for pin in self.by_id.values() if pin.sequence is not None]

    # ---- changes -----------------------------------------------------------------------------

    def add(self, pin: Pin) -> None:
        """Add a pin and reserve its blocks."""
        self.by_id[pin.request.request_id] = pin
        self._count_blocks()

    def remove(self, pin: Pin) -> None:
        """Remove a pin and its reservation."""
        del self.by_id[pin.request.request_id]
        self._count_blocks()

    def take_over(self, pins: list[Pin]) -> None:
        """Take over the blocks of sequences that have computed their last token."""
        for pin in pins:
            assert pin.sequence is not None, "no request computes the prefix"
            pin.sequence.blocks.advance(pin.num_tokens)
            pin.blocks, pin.sequence = self._kv.fork(pin.sequence.blocks), None
            self.ready.append(pin)
        if pins:
            self.ready.sort(key=lambda pin: -pin.num_tokens)
            self._count_blocks()

    def give_up(self, pin: Pin) -> None:
        """Free the blocks of a pin."""
        assert pin.blocks is not None, "the prefix is not computed yet"
        self._kv.free(pin.blocks)
        pin.blocks = None
        self.ready.remove(pin)

    def name(self, pin: Pin, sequence: Sequence) -> None:
        """Set the name by which requests find a pin. sequence: computes the prefix."""
        pin.digest = self._names.of_prefix(sequence, pin.num_tokens)

    def _count_blocks(self) -> None:
        by_pin = [pin.max_blocks for pin in self.by_id.values()]
        nothing = [0] * len(self.reserved)
        self.reserved = [sum(each) for each in zip(nothing, *by_pin, strict=True)]
        self._memory.reserve(self.reserved)
        self.num_changes += 1

    # ---- hits --------------------------------------------------------------------------------

    def find_pin(self, sequence: Sequence) -> Pin | None:
        """Return the longest pinned prefix that a sequence may fork and that saves it tokens, or
        None."""
        if not self.ready:
            return None
        return next((pin for pin in self.fitting(sequence) if self.num_usable(pin, sequence)), None)

    def fitting(self, sequence: Sequence) -> Iterator[Pin]:
        """Yield all pins that a sequence may fork, longest first."""
        for pin in self.ready if sequence.may_read_cache else ():
            is_longer = pin.num_tokens > sequence.num_prompt_tokens
            if not is_longer and self._names.of_prefix(sequence, pin.num_tokens) == pin.digest:
                yield pin

    def num_usable(self, pin: Pin, sequence: Sequence) -> int:
        """Return the number of a pin's tokens that a sequence need not compute. At least one token
        of the sequence remains. Return 0 if the pin's tables lack tokens visible to the next one:
        windows only cover the pin's own end."""
        readable = min(sequence.num_known_tokens - 1, sequence.num_readable_tokens)
        num_tokens, kv = min(pin.num_tokens, readable), self._kv
        tables = () if pin.blocks is None else pin.blocks.tables
        is_there = all(
            table.can_continue_at(num_tokens, group.first_needed(num_tokens))
            for table, group in zip(tables, kv.groups, strict=bool(tables))
        )
        return num_tokens if is_there else 0

    def num_tokens(self, sequence: Sequence) -> int:
        """See HitSource. Cached until pins change, which is rare."""
        at, num_tokens = sequence.found_elsewhere.get(Source.PINNED, (-1, 0))
        if at != self.num_changes:
            pin = self.find_pin(sequence)
            num_tokens = 0 if pin is None else self.num_usable(pin, sequence)
            sequence.found_elsewhere[Source.PINNED] = self.num_changes, num_tokens
        return num_tokens

    def find(self, sequence: Sequence, best: KVBlocks | None) -> KVBlocks | None:
        """See HitSource. The last block of the hit may be partly full."""
        pin = self.find_pin(sequence)
        if pin is None or pin.blocks is None:
            return best
        num_tokens = self.num_usable(pin, sequence)
        if best is not None and best.num_tokens >= num_tokens + (not best.is_in_use):
            num_full = num_tokens // self._kv.block_size
            return best if best.is_in_use else _upon(pin.blocks, best, num_full)
        num_blocks = -(-num_tokens // self._kv.block_size)
        blocks = tuple(table.blocks[:num_blocks] for table in pin.blocks.tables)
        return KVBlocks(num_tokens, blocks, source=Source.PINNED)

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Count the hit of a newly admitted sequence, if it begins with a pin."""
        pin = self.find_pin(sequence)
        if pin is not None and sequence.num_preemptions == 0 and sequence.report is None:
            pin.num_hits += 1
            pin.num_own_hits += sequence.request.tenant == pin.request.tenant
            self.num_hits += 1
            self.num_hit_tokens += self.num_usable(pin, sequence)

    def lasting_blocks(self, sequence: Sequence) -> list[int]:
        """Count the full blocks, by cache group, that a sequence shares with a pin until it ends.
        Groups that drop blocks, such as windows, count as 0."""
        pin, kv = self.find_pin(sequence), self._kv
        num_blocks = 0 if pin is None else self.num_usable(pin, sequence) // kv.block_size
        return [num_blocks if group.keeps_all else 0 for group in kv.groups]

    # ---- reports -----------------------------------------------------------------------------

    def tables(self) -> list[SequenceBlocks]:
        """Return the tables of all complete pins."""
        return [pin.blocks for pin in self.ready if pin.blocks is not None]

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks in the fullest cache group."""
        return self._max_group_blocks(self.tables())

    def _max_group_blocks(self, blocks: list[SequenceBlocks]) -> int:
        return max(self._kv.num_distinct(blocks))

    def listing(self, now: float, tenant: str | None = None) -> list[PinnedPrefix]:
        """Return the pins of a tenant with that tenant's hits, oldest first; all pins and hits if
        None."""
        return [
            PinnedPrefix(
                id=prefix_id,
                num_tokens=pin.num_tokens,
                num_blocks=0 if pin.blocks is None else self._max_group_blocks([pin.blocks]),
                is_ready=pin.blocks is not None,
                age_s=now - pin.since_s,
                expires_in_s=None if pin.ends_s == math.inf else max(0.0, pin.ends_s - now),
                num_hits=pin.num_hits if tenant is None else pin.num_own_hits,
            )
            for prefix_id, pin in self.by_id.items()
            if tenant in (None, pin.request.tenant) and pin.ends_s > now
        ]


def _upon(pinned: SequenceBlocks, hit: KVBlocks, num_full: int) -> KVBlocks:
    """Return a hit longer than a pinned prefix, with the prefix's num_full full blocks in place of
    the hit's."""
    blocks, host = [], []
    for g, mine in enumerate(hit.blocks):
        theirs = pinned.tables[g].blocks[:num_full]
        pairs = zip(theirs, mine, strict=False)
        shared = [own if NULL in (own, block) else block for block, own in pairs]
        blocks.append(shared + mine[num_full:])
        away = hit.host[g] if hit.host else {}
        host.append({i: b for i, b in away.items() if i >= num_full or theirs[i] == NULL})
    return hit.replace(blocks=tuple(blocks), host=tuple(host))
