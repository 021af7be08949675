"""Miss reports: the reason why a prompt, or a part of it, was not found in the cache.

The last prompts are remembered with the digests of their blocks, their tokens, and the times of
evictions. The first missing block of a new prompt shows the reason:

    a remembered prompt has it       it was evicted, and when; or it is being computed
    one has the block before it      the prompts differ inside this block, at this token
    another root has the same text   another salt

A report influences no decision and is not part of a snapshot. A recording contains the reports of
its run.
"""

from collections import deque
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass, field
from typing import Any

from quire.base.plan import Record
from quire.base.prefix import (
    COMPUTING,
    COSTLY,
    DIVERGED,
    EVICTED,
    NEW,
    OFF,
    SALT,
    UNREAD,
    PrefixReport,
)
from quire.kv.digest import extend_digests
from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.core.extension import CacheListener, HitSource
from quire.scheduler.core.names import BlockNaming
from quire.scheduler.core.sequence import Int32, Sequence

Fields = dict[str, Any]  # of a report, by name
Publish = Callable[[Sequence, PrefixReport, bool, float], None]
MAX_COMPARED = 8  # number of recent prompts to compare, to find the nearest
MAX_BLOCKS = 1 << 14  # digests of all remembered prompts together: a few megabytes


class Remembered(Record, eq=False):
    """Remembered prompt, with its output after its end. sequence: None after its end. num_computed:
    number of its blocks in the index at its end."""

    request_id: str
    tenant: str
    root: bytes
    first: bytes  # tokens of its first block
    digests: list[bytes]
    num_digests: int  # digests entered in `by_digest`
    tokens: Int32
    sequence: Sequence | None
    num_computed: int = 0

    def was_computed(self, index: int) -> bool:
        """Return whether this block of the prompt is, or was, in the index."""
        line = self.sequence
        return index < (self.num_computed if line is None else line.blocks.num_indexed)

    def has(self, digest: bytes, num_blocks: int) -> bool:
        """Return whether its block number num_blocks, counted from 1, has this digest."""
        return len(self.digests) >= num_blocks and self.digests[num_blocks - 1] == digest

    def fields(self, sequence: Sequence) -> Fields:
        """Return the report fields about this prompt, for a report on this sequence."""
        is_own = self.tenant == sequence.request.tenant
        return {"near_id": self.request_id, "near_is_own": is_own}


@dataclass(slots=True)
class Generation:
    """Generation of remembered prompts. by_digest: the latest prompt by block digest, and by root.
    by_first: by the tokens of the first block. lost_s: times of evictions, by digest."""

    by_digest: dict[bytes, Remembered] = field(default_factory=dict)
    by_first: dict[bytes, Remembered] = field(default_factory=dict)
    lost_s: dict[bytes, float] = field(default_factory=dict)


class MissReports(HitSource, CacheListener):
    """Memory of recent prompts, which reports the hit of each new prompt and the reason of its
    miss.

    `publish`: called with a sequence, its report, whether it has a hit, and the time. max_blocks:
    digests to remember, in two generations; when the younger one is full, the older one is dropped.
    As the last hit source, it finds no hits itself and sees the hits of the others.
    """

    entries: Sized = (True,)  # never empty, so that `begin` is called for each admission

    def __init__(
        self, kv: KVManager, names: BlockNaming, publish: Publish, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._kv, self._names = kv, names
        self._max_young = max_blocks // 2
        self.start(publish)

    def start(self, publish: Publish) -> None:
        """Start without remembered prompts, also after a snapshot."""
        self._publish = publish
        self.reset(0.0)

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """See HitSource: report the prefix hit of a new request, and remember its prompt."""
        if sequence.num_preemptions or sequence.report is not None:
            return
        first = sequence.saved_tokens[: self._kv.block_size].tobytes()
        self._publish(sequence, self._report(sequence, first, hit, now), hit.num_tokens > 0, now)
        self._enter_prompt(sequence, first)

    def reset(self, now: float) -> None:
        """Forget all prompts."""
        self._last = deque[Remembered](maxlen=MAX_COMPARED)
        self._open: dict[int, Remembered] = {}  # by arrival
        self._young, self._old = Generation(), Generation()
        self._evicted = deque[tuple[float, list[bytes]]]()  # times and names not in `lost_s` yet
        self._num_evicted = 0

    def _enter_prompt(self, sequence: Sequence, first: bytes) -> None:
        """Remember the prompt of an admitted request. first: the tokens of its first block."""
        if not sequence.digests:
            return
        sequence.watch(self)
        found = Remembered(
            request_id=sequence.request.request_id,
            tenant=sequence.request.tenant,
            root=sequence.root,
            first=first,
            digests=sequence.digests,
            num_digests=0,
            tokens=sequence.saved_tokens,
            sequence=sequence,
        )
        self._open[sequence.arrival] = found
        self._last.append(found)
        self._young.by_digest[found.root] = self._young.by_first[found.first] = found
        self._add_digests(found, len(sequence.digests))

    def leave(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record how many blocks of an ending sequence were computed. It still has its blocks."""
        found = self._open.get(sequence.arrival)
        if found is None:
            return
        num_indexed = sequence.blocks.num_indexed if sequence.row >= 0 else found.num_digests
        found.sequence, found.num_computed = None, num_indexed
        self._add_digests(found, num_indexed)

    def forget(self, sequence: Sequence) -> None:
        """Take the tokens of an ended sequence. Without a row it stores them itself."""
        found = self._open.pop(sequence.arrival, None)
        if found is not None:
            found.tokens = sequence.saved_tokens

    def _add_digests(self, found: Remembered, num: int) -> None:
        new, young = found.digests[found.num_digests : num], self._young.by_digest
        found.num_digests += len(new)
        young.update(dict.fromkeys(new, found))
        if len(young) > self._max_young:
            self._young, self._old = Generation(), self._young

    def _known(self, digest: bytes) -> Remembered | None:
        return self._young.by_digest.get(digest) or self._old.by_digest.get(digest)

    def end_plan(self, now: float) -> None:
        """Record the evictions of all pools since the last call."""
        kv = self._kv
        for pool in (*kv.pools, *kv.host_pools):
            if pool.lost:
                self._evicted.append((now, list(pool.lost)))
                self._num_evicted += len(pool.lost)
                pool.lost.clear()
        if self._num_evicted > 2 * self._max_young:
            self._note_evictions()

    def _note_evictions(self) -> None:
        """Note the times at which known blocks were evicted, which only some reports need."""
        young, old = self._young.by_digest, self._old.by_digest
        for at_s, names in self._evicted:
            known = [digest for digest in names if digest in young or digest in old]
            self._young.lost_s.update(dict.fromkeys(known, at_s))
        self._evicted.clear()
        self._num_evicted = 0

    # ---- reports -----------------------------------------------------------------------------

    def _report(self, sequence: Sequence, first: bytes, hit: KVBlocks, now: float) -> PrefixReport:
        """Return the report of a new request's prompt: its hit by location, and the reason of its
        miss. first: the tokens of its first block."""
        size, num_tokens = self._kv.block_size, hit.num_tokens
        miss = self._miss(sequence, first, hit, now)
        if not num_tokens:
            return PrefixReport(**miss)
        if hit.source:
            found: Fields = {hit.source: num_tokens}
            return PrefixReport(**found, **miss)
        away = max([0, *(_num_tokens(loads, num_tokens, size) for loads in hit.host)])
        store = min(away, sequence.num_fetched_blocks * size)
        return PrefixReport(
            device=num_tokens - away,
            host=away - store,
            store=store,
            **miss,
        )

    def _miss(self, sequence: Sequence, first: bytes, hit: KVBlocks, now: float) -> Fields:
        kv, num_tokens = self._kv, len(sequence.saved_tokens)
        index, max_hit_blocks = hit.num_tokens // kv.block_size, (num_tokens - 1) // kv.block_size
        if index >= max_hit_blocks:
            return {}
        if not self._names.is_indexed(sequence):
            return {"miss": OFF}
        if not sequence.num_readable_tokens:
            return {"miss": UNREAD}
        known = self._known(sequence.digests[index])
        if known is not None:
            return self._lost(sequence, known, index, now)
        other = {} if index else self._elsewhere(sequence, first, max_hit_blocks)
        before = sequence.digests[index - 1] if index else sequence.root
        near = self._known(before)
        if near is None:
            return other | {"miss": SALT if other else NEW}
        others = [] if index == 0 else [each for each in self._last if each.has(before, index)]
        return other | self._apart(sequence, first, [near, *others], index * kv.block_size)

    def _lost(self, sequence: Sequence, known: Remembered, index: int, now: float) -> Fields:
        """Return the reason why a block of a remembered prompt is not used."""
        kv, digest = self._kv, sequence.digests[index]
        near = known.fields(sequence)
        if not known.was_computed(index):  # it never will be, if its prompt has ended
            return {"miss": NEW} if known.sequence is None else near | {"miss": COMPUTING}
        tier = kv.tier
        if tier and all(tier.lookup(g, digest) is not None for g in range(len(kv.groups))):
            return near | {"miss": COSTLY}
        self._note_evictions()
        at_s = self._young.lost_s.get(digest, self._old.lost_s.get(digest))
        return near | {"miss": EVICTED, "lost_s": -1.0 if at_s is None else now - at_s}

    def _apart(
        self, sequence: Sequence, first: bytes, nearest: list[Remembered], start: int
    ) -> Fields:
        """Return where a prompt diverges from the nearest of the prompts that agree up to this
        block.

        A prompt of the same tenant is preferred to all others. So a tenant learns nothing about the
        prompts of others, not even that one of them is nearer.
        """
        end, tenant = start + self._kv.block_size, sequence.request.tenant
        mine = sequence.tokens_between(start, end).tobytes() if start else first
        near, closest = nearest[0], (False, -1)
        for each in nearest:
            other = each.tokens[start:end].tobytes() if start else each.first
            closeness = each.tenant == tenant, _num_common(mine, other)
            if closeness > closest:
                near, closest = each, closeness
        common = closest[1]
        return near.fields(sequence) | {
            "miss": NEW if start + common == len(near.tokens) else DIVERGED,
            "at_token": start + common,
        }

    def _elsewhere(self, sequence: Sequence, first: bytes, max_hit_blocks: int) -> Fields:
        """Return the number of a prompt's tokens that are cached under another salt, if any."""
        kv = self._kv
        near = self._young.by_first.get(first) or self._old.by_first.get(first)
        if near is None or near.root == sequence.root:
            return {}
        digests, tokens = list[bytes](), sequence.known_tokens
        block_hash = self._names.digester.block_hash
        extend_digests(
            digests, near.root, tokens, kv.block_size, max_hit_blocks, block_hash, sequence.marks
        )
        num_blocks = kv.num_computed_blocks(digests, len(tokens))
        if not num_blocks:
            return {}
        return {"num_other_tokens": num_blocks * kv.block_size}


def _num_tokens(blocks: Collection[int], num_tokens: int, size: int) -> int:
    """Return the number of tokens in some blocks, by logical index, of the first num_tokens."""
    is_last_partial = num_tokens % size > 0 and num_tokens // size in blocks
    return len(blocks) * size - is_last_partial * (-num_tokens % size)


def _num_common(one: bytes, other: bytes) -> int:
    """Return the number of equal int32 values at the beginning of both byte strings."""
    if one[:4] != other[:4]:
        return 0
    size = min(len(one), len(other))
    differs = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return ((differs & -differs).bit_length() - 1) // 32 if differs else size // 4
