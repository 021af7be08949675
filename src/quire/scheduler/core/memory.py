"""KV memory of the scheduler: checks whether a need fits, and allocates blocks to sequences.

A need is a number of blocks per cache group.

    fits now       needs + reserve  <= free blocks      to admit or resume a sequence
    fits at all    needs + reserved <= all blocks       to accept a request

Hit sources (extension.py) find the cached beginning of a prompt. They may hold evictable blocks:
`could_fit` counts these, `make_room` evicts them.

In the scheduler, only this file accesses the pools. A subclass can change the rules: the need of a
sequence (`needs_to_start`), the blocks left free (`fits`), allocation and release (`start`,
`free`). For example, Orca's manager (P 6.1) reserves a sequence's whole limit when it starts.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from quire.base.messages import MeasuredRates
from quire.kv.host_tier import Copies, Name
from quire.kv.manager import KVBlocks, KVManager, SequenceBlocks
from quire.kv.table import Appended
from quire.scheduler.core.extension import CacheListener, ChunkLimit, HitSource, overriding
from quire.scheduler.core.names import BlockNaming, Digester
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.sequence import Sequence
from quire.spec.cache_group import STATE, STEP

STEP_UP = 1.0  # blocks per running row
STEP_DOWN = 0.95
STATE_RESERVE = 8  # admissions leave at most 1/STATE_RESERVE of the states free
PROMPT_TAIL = 8  # first tokens of an answer that a template may add and later omit
EPSILON = 1e-6  # so that a third of 300 is 100, despite binary fractions

Needs = Seq[int]  # blocks, by cache group
Tables = Seq[Seq[int]]  # block numbers, by cache group


class Excess(NamedTuple):
    """Need of a cache group that exceeds its share."""

    num_needed: int
    num_allowed: int
    num_blocks: int


@dataclass(slots=True)
class Headroom:
    """Number of blocks that an admission leaves free, so that running rows can grow without
    preempting each other in a cascade (text H).

    It is a watermark, a fixed share of the pool, plus blocks per running row. That number grows by
    one after each preemption and shrinks by 5 % after each end. So admission slows down while
    preemptions are frequent, and a few percent of sequences are preempted, whatever their lengths.

    blocks_per_row: expected growth of each running row before some sequence ends.
    """

    num_blocks: int
    watermark_blocks: int
    blocks_per_row: float = 0.0

    def take_preemption(self, num_rows: int) -> None:
        """Raise the headroom after a preemption, to at most half the pool. num_rows: rows still
        running."""
        num_allowed = self.num_blocks / 2 / max(1, num_rows)
        self.blocks_per_row = min(self.blocks_per_row + STEP_UP, num_allowed)

    def take_end(self) -> None:
        """Lower the headroom after a sequence has ended."""
        self.blocks_per_row *= STEP_DOWN

    def blocks(self, num_rows: int) -> int:
        return self.watermark_blocks + int(self.blocks_per_row * num_rows)


class Memory:
    """KV manager together with the rules that allocate its blocks to sequences.

    chunk: maximum tokens of a sequence per step. fingerprint: identifies the contents of the cache.
    sources: hit sources in the order of calls. reserved: blocks per cache group for pinned
    prefixes.

    State of the plan being made: copied lists the (group, block) pairs that it copies from.
    kept_copied lists the pairs among them that are held until it is complete, since their table was
    evicted. spent lists the tables to free after it. chunk_limit is the limit on its tokens other
    than blocks.
    """

    chunk_limit: ChunkLimit = ChunkLimit()  # the default limits nothing, also after an old snapshot

    def __init__(
        self,
        kv: KVManager,
        chunk: int,
        watermark: float = 0.01,
        fingerprint: bytes = b"",
        digester: Digester | None = None,
    ) -> None:
        pairs = list(zip(kv.groups, kv.pools, strict=True))
        sizes = [pool.num_blocks for group, pool in pairs if group.kind != STATE]
        num_blocks = min(sizes or [pool.num_blocks for pool in kv.pools])
        self.kv = kv
        self.block_size = kv.block_size
        self.rates = MeasuredRates()
        self.headroom = Headroom(num_blocks, int(watermark * num_blocks))
        digester = digester or Digester()
        self.names = BlockNaming(kv.block_size, kv.enable_prefix_caching, fingerprint, digester)
        self.sources: list[HitSource] = []
        self.listeners: list[CacheListener] = []
        self._connect()
        self.reserved = [0] * len(kv.groups)
        self.copied: list[tuple[int, int]] = []
        self.kept_copied: list[tuple[int, int]] = []
        self.spent: list[SequenceBlocks] = []
        self._chunk = chunk

    @property
    def _kinds(self) -> list[str]:
        """Kinds of the cache groups, by group."""
        return [group.kind for group in self.kv.groups]

    def attach(self, feature: object) -> None:
        """Connect a source, a listener or the chunk limit. They are called in the order of
        attaching."""
        if isinstance(feature, HitSource):
            self.sources.append(feature)
        if isinstance(feature, CacheListener):
            self.listeners.append(feature)
        if isinstance(feature, ChunkLimit):
            self.chunk_limit = feature
        self._connect()

    def _connect(self) -> None:
        """Collect the methods that features override; default methods are not called."""
        sources, listeners = self.sources, self.listeners
        self._finding = overriding(sources, HitSource, "find")
        self._preparing = overriding(sources, HitSource, "prepare")
        self._begun = overriding(sources, HitSource, "begin")
        self._lasting = overriding(sources, HitSource, "lasting_blocks")
        self._named = overriding(listeners, CacheListener, "named")
        self._copying = overriding(listeners, CacheListener, "copy_out")
        self._planned = overriding(listeners, CacheListener, "end_plan")
        self._limits = overriding([self.chunk_limit], ChunkLimit, "limit")
        self._grants = overriding([self.chunk_limit], ChunkLimit, "grant")

    def reserve(self, blocks: Needs) -> None:
        """Reserve blocks, by cache group, for pinned prefixes."""
        self.reserved = list(blocks)

    def continue_with(self, digester: Digester) -> None:
        """Restore the parts that a snapshot omits: the digester and the subscribers."""
        self.names.digester, self.names.new = digester, None
        self._connect()

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every prompt must be computed in one step, since no keys and values are
        stored."""
        return STEP in self._kinds

    @property
    def names_partial_blocks(self) -> bool:
        """Whether a sequence may begin within a block by name. A state is stored only after a full
        block."""
        return self.kv.enable_prefix_caching and not {STATE, STEP} & set(self._kinds)

    # ---- other limits of a plan --------------------------------------------------------------

    def limit_chunk(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> int:
        """See `ChunkLimit.limit`."""
        for _, limit in self._limits:
            num = limit(sequence, first, num, builder)
        return num

    def grant_chunk(self, sequence: Sequence, first: int, num: int, builder: PlanBuilder) -> None:
        """See `ChunkLimit.grant`."""
        for _, grant in self._grants:
            grant(sequence, first, num, builder)

    # ---- does it fit -------------------------------------------------------------------------

    def fits(self, needs: Needs, reserve: int = 0) -> bool:
        """Return whether this need fits now and leaves `reserve` blocks of each group free. The
        reserve of a state group is capped, since a sequence needs no more states as it grows."""
        if reserve and self.kv.has_states:
            needs, reserve = self._with_reserve(needs, reserve), 0
        return self.kv.fits(needs, reserve)

    def could_fit(self, needs: Needs, reserve: int = 0, hit: Tables = ()) -> bool:
        """Return whether this need fits once all evictable blocks are evicted. hit: blocks, by
        cache group, that the sequence begins with; evicting these gains nothing."""
        if self.fits(needs, reserve):
            return True
        gain = self.kv.num_evictable(hit)
        lacking = [need - more for need, more in zip(needs, gain, strict=True)]
        return self.fits(lacking, reserve)

    def fits_at_all(self, needs: Needs, reserved: Needs | None = None) -> bool:
        """Return whether this need fits into the pools together with the reserved blocks."""
        kept = self.reserved if reserved is None else reserved
        for g, pool in enumerate(self.kv.pools):  # noqa: SIM110 (a generator takes longer)
            if needs[g] + kept[g] > pool.num_blocks:
                return False
        return True

    def excess(self, needs: Needs, share: float) -> Excess | None:
        """Return the first excess of this need over a share of the pools, or None. share: 0 to
        1."""
        for need, pool in zip(needs, self.kv.pools, strict=True):
            num_allowed = int(share * pool.num_blocks + EPSILON)
            if need > num_allowed:
                return Excess(need, num_allowed, pool.num_blocks)
        return None

    def needs_to_start(self, sequence: Sequence, hit: KVBlocks, num_new: int) -> Needs:
        """Return the need of a waiting sequence that begins with a hit and computes num_new
        tokens."""
        return self.kv.needs_with_hit(sequence.num_known_tokens, hit, num_new)

    def needs_of_all(self, sequence: Sequence, num_tokens: int, num: int) -> Needs:
        """Return the need of `num` sequences of a request, each of num_tokens tokens. Reserved
        blocks that they share are subtracted."""
        shared = sequence.num_prompt_tokens // self.block_size
        needs: Needs = self.kv.group_blocks(num_tokens, shared, num, min(self._chunk, num_tokens))
        for source, lasting_blocks in self._lasting:
            if source.entries and (lasting := lasting_blocks(sequence)):
                needs = [need - mine for need, mine in zip(needs, lasting, strict=True)]
        return needs

    def needs_of_prefix(self, num_tokens: int) -> list[int]:
        """Return the need of a pinned prefix of num_tokens tokens. It has only its last state."""
        needs = self.kv.group_blocks(num_tokens, 0, 1, min(self._chunk, num_tokens))
        return [1 if k == STATE else need for k, need in zip(self._kinds, needs, strict=True)]

    def needs_to_stand(self, blocks: Seq[SequenceBlocks]) -> Needs:
        """Return the number of distinct blocks of these sequences, plus one for each sequence."""
        return [num + len(blocks) for num in self.kv.num_distinct(blocks)]

    def needs_to_return(self, members: Seq[Sequence], reserve: int) -> Needs:
        """Return the need of swapped members that resume, with one more block each and a reserve.
        It is capped at the unreserved blocks, since a large group could otherwise never resume."""
        needs = self.needs_to_stand([member.swapped for member in members])
        held = zip(self.kv.pools, self.reserved, strict=True)
        room = [pool.num_blocks - kept for pool, kept in held]
        needed = self._with_reserve(needs, reserve)
        return [min(n, num_allowed) for n, num_allowed in zip(needed, room, strict=True)]

    def make_room(self, needs: Needs, reserve: int = 0, spared: Sequence | None = None) -> bool:
        """Evict blocks of sources until this need fits; return True. If eviction cannot be enough,
        evict nothing and return False. spared: as in `HitSource.evict_one`."""
        if not self.could_fit(needs, reserve):
            return False
        while not self.fits(needs, reserve):
            if not self.evict_one(spared):
                return False
        return True

    def evict_one(self, spared: Sequence | None = None) -> bool:
        """Let the first source with evictable tables evict one; return whether there was one. Hold
        the blocks that the plan being made copies from until it is complete. It may otherwise
        overwrite freed blocks."""
        copied, self.copied = self.copied, []
        for g, block_id in copied:
            if self.kv.pools[g].num_refs(block_id):
                self.kv.pools[g].acquire(block_id)
                self.kept_copied.append((g, block_id))
        return any(source.evict_one(spared) for source in self.sources)

    def _with_reserve(self, needs: Needs, reserve: int) -> Needs:
        if reserve == 0 or not self.kv.has_states:
            return [need + reserve for need in needs]
        return [
            need + (min(reserve, pool.num_blocks // STATE_RESERVE) if kind == STATE else reserve)
            for need, pool, kind in zip(needs, self.kv.pools, self._kinds, strict=True)
        ]

    def growth(self, num_tokens: int, limit: int) -> int:
        """Return the number of blocks that a sequence of this length lacks up to its limit."""
        return -(-limit // self.block_size) - num_tokens // self.block_size

    # ---- allocation --------------------------------------------------------------------------

    def new_sequence(self) -> SequenceBlocks:
        return self.kv.new_sequence()

    def find_hit(self, sequence: Sequence) -> KVBlocks:
        """Return the cached blocks that this sequence may begin with."""
        best: KVBlocks | None = None
        for source, find in self._finding:
            if source.entries:
                best = find(sequence, best)
        return best or KVBlocks(0, tuple([[] for _ in self.kv.groups]))

    @property
    def can_prepare(self) -> bool:
        """Return whether a source may fetch what the head of the queue lacks."""
        return bool(self._preparing)

    def prepare(self, sequence: Sequence) -> bool:
        """Let the sources fetch what the head of the queue lacks. Return whether it may start."""
        return all(prepare(sequence) for _, prepare in self._preparing)

    def num_found_tokens(self, sequence: Sequence) -> int:
        """Return the length of the longest hit of any source, regardless of the cost to load it."""
        found = (source.num_tokens(sequence) for source in self.sources if source.entries)
        return max(found, default=0)

    def start(self, sequence: Sequence, num_new: int, hit: KVBlocks) -> tuple[Appended, ...] | None:
        """Allocate the blocks of a waiting sequence's hit and next tokens. Return the table changes
        by cache group, or None if blocks are lacking."""
        if self.kv.has_states:
            self.kv.states.keep_states(sequence.blocks.tables, *self._states_to_keep(sequence, hit))
        if hit.num_loads:
            for listener in self.listeners:
                listener.loaded(sequence, hit.num_tokens // self.block_size)
        appended = self.kv.allocate_slots(sequence.blocks, num_new, hit)
        self._note_copies(appended or ())
        return appended

    def num_kept_blocks(self, hit: KVBlocks, appended: Seq[Appended]) -> int:
        """Return the number of a hit's blocks that the sequence still has after `start`. It has
        copied a last block that is not full, unless no other table held the block."""
        num_full, num_more = divmod(hit.num_tokens, self.block_size)
        copied = [one.writes[:1] and one.writes[0][0] == num_full for one in appended]
        return num_full + (num_more > 0 and not all(copied))

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Notify the sources that a sequence was given its row with this hit."""
        for source, begin in self._begun:
            if source.entries:
                begin(sequence, hit, now)

    def _states_to_keep(self, sequence: Sequence, hit: KVBlocks) -> tuple[set[int], int]:
        """Return the logical blocks after which a sequence's state is stored, and the last full
        block of its prompt. That block is stored if the hit ends before it. The other stored block
        is the last block that matches earlier prompts, unless a sequence ended there and its state
        was evicted."""
        digests, num_tokens = self.names.readable(sequence)
        prompt_end = (sequence.num_prompt_tokens - 1 - PROMPT_TAIL) // self.block_size - 1
        kv, states = self.kv, self.kv.states

        def is_found(g: int, digest: bytes) -> bool:
            return g in states.groups or kv.is_cached(g, digest)

        parted = kv.num_computed_blocks(digests, num_tokens, is_found) - 1
        last_found = hit.num_tokens // self.block_size - 1
        kept = {prompt_end} if prompt_end > last_found else set()
        near = 1 + -(-PROMPT_TAIL // self.block_size)
        ends = digests[max(0, parted + 1 - near) : parted + 1]
        if parted - last_found >= near and not states.statistics.ends_sequence(ends):
            kept.add(parted)
        return kept, prompt_end

    def grow(self, sequence: Sequence, num_new: int) -> tuple[Appended, ...] | None:
        """Allocate blocks for the next tokens of a running sequence, and return the changes as
        `start` does. If blocks are lacking, evict blocks of sources."""
        blocks, num_unsure = sequence.blocks, sequence.num_drafts_in_flight
        blocks.advance(sequence.num_computed_tokens)
        grow = self.kv.allocate_slots
        while (appended := grow(blocks, num_new, num_unsure=num_unsure)) is None:
            if not self.evict_one():
                return None
        self._note_copies(appended)
        return appended

    def grow_by_drafts(
        self, sequence: Sequence, num: int, reserve: int = 0
    ) -> tuple[Appended, ...] | None:
        """Allocate blocks for draft tokens that follow the tokens of the plan being made. Return
        the changes as `grow` does. reserve: blocks of each group to leave free."""
        num_computed, grow = sequence.num_computed_tokens, self.kv.append_drafts
        while (appended := grow(sequence.blocks, num_computed, num, reserve)) is None:
            if not self.evict_one():
                return None
        self._note_copies(appended)
        return appended

    def take_back(self, sequence: Sequence) -> bool:
        """Free the blocks of rejected drafts, and the states that accepted drafts have passed.
        Return whether the sequence has fewer blocks now."""
        num_tokens, blocks = sequence.num_computed_tokens, sequence.blocks
        had_more = blocks.num_tokens > num_tokens
        if had_more:
            self.kv.truncate(blocks, num_tokens)
        if self.kv.has_states:
            blocks.advance(num_tokens)
            self.kv.states.end_drafts(blocks.tables)
        return had_more

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's blocks with the child until one of them writes."""
        child.blocks = self.kv.fork(parent.blocks)

    def free(self, sequence: Sequence) -> None:
        """Free the device blocks of a sequence."""
        self.kv.free(sequence.blocks)

    def name_full_blocks(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[list[list[int]]]:
        """Enter the first counts[i] blocks of sequence i in the index. Return the newly named
        blocks, by sequence and cache group."""
        self.names.extend(sequences, counts)
        firsts = [s.blocks.num_indexed for s in sequences] if self._named else ()
        index = self.kv.index_blocks
        named = [index(s.blocks, s.digests, counts[i]) for i, s in enumerate(sequences)]
        for _, note in self._named:
            note(sequences, firsts, counts, named)
        return named

    # ---- host memory -------------------------------------------------------------------------

    def free_swapped(self, sequence: Sequence) -> None:
        """Free the host blocks of a sequence, if it has any."""
        if sequence.host_blocks is not None:
            self.kv.free(sequence.host_blocks)
            sequence.host_blocks = None

    def settle(self, step_id: int) -> list[Name]:
        """Make the host copies of this step's plan readable. Return the names of the copied
        blocks."""
        return [] if self.kv.tier is None else self.kv.tier.settle(step_id)

    def copies_out(self) -> list[Copies]:
        """Return the plan's copies to host memory, by cache group: evicted blocks, and blocks that
        listeners add."""
        if self.kv.tier is None:
            return []
        copies = self.kv.tier.take_evicted()
        for _, add in self._copying:
            add(copies)
        return copies

    def end_plan(self, step_id: int, now: float) -> None:
        """Note that a plan is complete, with all copies so far."""
        if self.kv.has_states:
            self.kv.states.end_plan()
        self.end_turn(now)
        if self.kv.tier is not None:
            self.kv.tier.end_plan(step_id)

    def end_turn(self, now: float) -> None:
        """Note that a plan is complete, or that there was nothing to compute. Free its spent
        blocks."""
        for blocks in self.spent:
            self.kv.free(blocks)
        for g, block_id in self.kept_copied:
            self.kv.pools[g].release(block_id)
        self.copied, self.kept_copied, self.spent = [], [], []
        for _, end in self._planned:
            end(now)

    def free_after_plan(self, blocks: SequenceBlocks) -> None:
        """Free tables once the plan being made is complete. Until then it may copy from these
        blocks, or overwrite them if they were free."""
        self.kv.set_evictable(blocks, False)
        self.spent.append(blocks)

    def _note_copies(self, appended: Seq[Appended]) -> None:
        """Record which blocks the plan being made copies from."""
        for g, one in enumerate(appended):
            if one.copies:
                self.copied += [(g, source) for source, _ in one.copies]

    # ---- removing names ----------------------------------------------------------------------

    def distrust(self, blocks: Seq[Iterable[int]]) -> None:
        """Remove the names of these blocks, by cache group, and of unsettled host blocks."""
        self.kv.unindex_blocks(blocks)
        if self.kv.tier is not None:
            self.kv.tier.forget_unsettled()

    def forget(self, sequence: Sequence) -> None:
        """Remove the names of all blocks of a sequence."""
        self.kv.forget(sequence.digests)

    def reset(self, fingerprint: bytes, now: float) -> None:
        """Remove all names. New names begin with this fingerprint."""
        self.kv.reset_prefix_cache()
        for listener in self.listeners:
            listener.reset(now)
        self.names.fingerprint = fingerprint
