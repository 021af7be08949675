"""KV memory as the scheduler sees it: one question, "does this need fit", and who takes what.

A need is a number of blocks for each cache group. It fits now if so many are free besides a reserve
for those that run to grow into; it fits at all if the pools have so many besides what is pinned.

    free now    needs + reserve  <= free blocks      who is admitted, or comes back from the host
    at all      needs + reserved <= all blocks       who is accepted

What a prompt may begin with comes from a list of hit sources (extension.py), which may also hold
blocks that they give up when others need them: `fits` asks, `make_room` evicts.

This is the only place of the scheduler that sees pools. Another manager can stand in its place: a
class of this one that changes what a sequence needs (`needs_to_start`), what is kept from others
(`fits`), and what it takes and gives back (`start`, `free`). One that reserves, as Orca's does
(P 6.1), needs the whole limit when it starts a sequence, and keeps what those that run have not
used of theirs.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from quire.base.cache_group import STATE, STEP
from quire.base.messages import MeasuredRates
from quire.kv.host_tier import Copies, Name
from quire.kv.manager import KVBlocks, KVManager, SequenceBlocks
from quire.kv.swapping import swap_in, swap_out
from quire.kv.table import Appended
from quire.scheduler.core.extension import CacheListener, HitSource, overriding
from quire.scheduler.core.names import BlockNaming, Digester
from quire.scheduler.core.sequence import Sequence

STEP_UP = 1.0  # blocks per running row
STEP_DOWN = 0.95
STATE_RESERVE = 8  # the share of the states that admissions leave free, at most
PROMPT_TAIL = 8  # tokens with which a template may begin an answer, and not later repeat it
EPSILON = 1e-6  # a third of 300 is 100, also in binary fractions

Needs = Seq[int]  # blocks, by cache group
Tables = Seq[Seq[int]]  # block numbers, by cache group


class Excess(NamedTuple):
    """A need of a cache group that is more than its share."""

    num_needed: int
    most: int
    num_blocks: int


@dataclass(slots=True)
class Headroom:
    """Blocks that an admission leaves free for those that run to grow into, or they would soon
    preempt each other, and what comes back would be preempted again (text H calls this a cascade).

    A watermark, a fixed share of the pool (P's engine has 1 %), and headroom per running row: a
    block more for every preemption, 5 % less for every sequence that ends. So admission slows down
    while preemption is frequent, and it settles where a few in a hundred sequences are preempted,
    whatever the lengths are.

    blocks_per_row: how much every running row is expected to grow before something ends.
    """

    num_blocks: int
    watermark_blocks: int
    blocks_per_row: float = 0.0

    def take_preemption(self, num_rows: int) -> None:
        """Leave more free; num_rows still run. The headroom never exceeds half the pool."""
        most = self.num_blocks / 2 / max(1, num_rows)
        self.blocks_per_row = min(self.blocks_per_row + STEP_UP, most)

    def take_end(self) -> None:
        """Leave less free: a sequence has ended."""
        self.blocks_per_row *= STEP_DOWN

    def blocks(self, num_rows: int) -> int:
        return self.watermark_blocks + int(self.blocks_per_row * num_rows)


class Memory:
    """The KV manager with all that decides who gets its blocks.

    chunk: most tokens that one step computes of a sequence; fingerprint: identifies the contents of
    the cache. sources: in the order in which they are asked; listeners: of names and copies.
    reserved: blocks, by cache group, that only certain tables may take. copied: (group, block) that
    rows of the plan being made copy from; kept_copied: those of them with a reference of their own
    until the plan is made, because who held them was evicted. spent: tables to free once the plan
    is made, which copies from them.
    """

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
        """The kinds of the cache groups."""
        return [group.kind for group in self.kv.groups]

    def attach(self, feature: object) -> None:
        """Connect a source or a listener; the order of attaching is the order of calls."""
        if isinstance(feature, HitSource):
            self.sources.append(feature)
        if isinstance(feature, CacheListener):
            self.listeners.append(feature)
        self._connect()

    def _connect(self) -> None:
        """Find the methods to call: those that are not a default, which would do nothing."""
        sources, listeners = self.sources, self.listeners
        self._finding = overriding(sources, HitSource, "find")
        self._begun = overriding(sources, HitSource, "begin")
        self._named = overriding(listeners, CacheListener, "named")
        self._copying = overriding(listeners, CacheListener, "copy_out")
        self._planned = overriding(listeners, CacheListener, "end_plan")

    def reserve(self, blocks: Needs) -> None:
        """Keep so many blocks, by cache group, from all but the tables that they are meant for."""
        self.reserved = list(blocks)

    def continue_with(self, digester: Digester) -> None:
        """Continue from a snapshot, which has no digester and no subscribers."""
        self.names.digester, self.names.new = digester, None
        self._connect()

    @property
    def keeps_nothing(self) -> bool:
        """Whether a prompt is computed in one step, because nothing is kept of its parts."""
        return STEP in self._kinds

    @property
    def block_size(self) -> int:
        return self.kv.block_size

    # ---- does it fit -------------------------------------------------------------------------

    def fits(self, needs: Needs, reserve: int = 0) -> bool:
        """Tell whether this need can be met now, with `reserve` blocks of each group to spare; of
        states fewer, since sequences that grow do not take more and more of them."""
        return self.kv.fits(self._with_reserve(needs, reserve))

    def could_fit(self, needs: Needs, reserve: int = 0, hit: Tables = ()) -> bool:
        """Tell whether this need can be met if sources give up what they can. hit: blocks, by cache
        group, that it begins with, which would be no gain."""
        if self.fits(needs, reserve):
            return True
        gain = self.kv.num_evictable(hit)
        lacking = [need - more for need, more in zip(needs, gain, strict=True)]
        return self.fits(lacking, reserve)

    def fits_at_all(self, needs: Needs, reserved: Needs | None = None) -> bool:
        """Tell whether the pools are large enough beside what is reserved, or would be."""
        kept = self.reserved if reserved is None else reserved
        pools = zip(needs, kept, self.kv.pools, strict=True)
        return all(need + held <= pool.num_blocks for need, held, pool in pools)

    def excess(self, needs: Needs, share: float) -> Excess | None:
        """Find a cache group in which this need exceeds a share of the blocks."""
        for need, pool in zip(needs, self.kv.pools, strict=True):
            most = int(share * pool.num_blocks + EPSILON)
            if need > most:
                return Excess(need, most, pool.num_blocks)
        return None

    def needs_to_start(self, sequence: Sequence, hit: KVBlocks, num_new: int) -> Needs:
        """Return what a waiting sequence takes that begins with a hit."""
        return self.kv.needs_with_hit(sequence.num_known_tokens, hit, num_new)

    def needs_of_all(self, sequence: Sequence, num_tokens: int, num: int) -> Needs:
        """Return what `num` sequences of a request need, besides what they share of reserved
        blocks, when each has so many tokens."""
        shared = sequence.num_prompt_tokens // self.block_size
        needs: Needs = self.kv.group_blocks(num_tokens, shared, num, min(self._chunk, num_tokens))
        for source in self.sources:
            if source.entries and (lasting := source.lasting_blocks(sequence)):
                needs = [need - mine for need, mine in zip(needs, lasting, strict=True)]
        return needs

    def needs_of_prefix(self, num_tokens: int) -> list[int]:
        """Return what a prompt of so many tokens may hold that stays: of states, the last one."""
        needs = self.kv.group_blocks(num_tokens, 0, 1, min(self._chunk, num_tokens))
        return [1 if k == STATE else need for k, need in zip(self._kinds, needs, strict=True)]

    def needs_to_stand(self, blocks: Seq[SequenceBlocks]) -> Needs:
        """Return what these hold together, and one block more for each."""
        return [num + len(blocks) for num in self.kv.num_distinct(blocks)]

    def needs_to_return(self, members: Seq[Sequence], reserve: int) -> Needs:
        """Return what members that were swapped out need to come back now, with a block more each
        and a reserve, which does not keep out who would have all that is not reserved."""
        needs = self.needs_to_stand([member.swapped for member in members])
        held = zip(self.kv.pools, self.reserved, strict=True)
        room = [pool.num_blocks - kept for pool, kept in held]
        wanted = self._with_reserve(needs, reserve)
        return [min(n, most) for n, most in zip(wanted, room, strict=True)]

    def make_room(self, needs: Needs, reserve: int = 0, spared: Sequence | None = None) -> bool:
        """Evict what sources hold until this need can be met; whether it can. Nothing is evicted if
        all of it would not be enough."""
        if not self.could_fit(needs, reserve):
            return False
        while not self.fits(needs, reserve):
            if not self.evict_one(spared):
                return False
        return True

    def evict_one(self, spared: Sequence | None = None) -> bool:
        """Free what the first source that holds something can best do without; whether there was
        something. Blocks that the plan being made copies from stay until it is made: blocks that
        are freed may be written by it."""
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
        """Count the blocks that a sequence of so many tokens lacks up to its limit."""
        return -(-limit // self.block_size) - num_tokens // self.block_size

    # ---- who takes what ----------------------------------------------------------------------

    def new_sequence(self) -> SequenceBlocks:
        return self.kv.new_sequence()

    def find_hit(self, sequence: Sequence) -> KVBlocks:
        """Find the cached blocks that this sequence may begin with."""
        best: KVBlocks | None = None
        for source, find in self._finding:
            if source.entries:
                best = find(sequence, best)
        return best or KVBlocks(0, tuple([] for _ in self.kv.groups))

    def num_found_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of such a hit, whatever it costs to load."""
        found = (source.num_tokens(sequence) for source in self.sources if source.entries)
        return max(found, default=0)

    def start(self, sequence: Sequence, num_new: int, hit: KVBlocks) -> tuple[Appended, ...] | None:
        """Give a waiting sequence the blocks of its hit and those for its next tokens; what changed
        by cache group, or None if they are not there."""
        if self.kv.has_states:
            self.kv.states.keep(sequence.blocks.tables, *self._states_to_keep(sequence, hit))
        if hit.num_loads:
            for listener in self.listeners:
                listener.loaded(sequence, hit.num_tokens // self.block_size)
        return self.kv.allocate_slots(sequence.blocks, num_new, hit)

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """Tell the sources that a sequence has got its row with this hit."""
        for source, begin in self._begun:
            if source.entries:
                begin(sequence, hit, now)

    def _states_to_keep(self, sequence: Sequence, hit: KVBlocks) -> tuple[set[int], int]:
        """Choose the logical blocks behind which a sequence leaves its state: one at the prompt's
        end, which comes second here; and the last that all but the states were found of, where
        others have parted from it, unless one had ended there whose state was evicted."""
        digests, num_tokens = self.names.readable(sequence)
        prompt_end = (sequence.num_prompt_tokens - 1 - PROMPT_TAIL) // self.block_size - 1
        parted = self.kv.num_computed_blocks(digests, num_tokens, self.kv.is_state_or_cached) - 1
        last_found = hit.num_tokens // self.block_size - 1
        kept = {prompt_end} if prompt_end > last_found else set()
        near = 1 + -(-PROMPT_TAIL // self.block_size)
        ends = digests[max(0, parted + 1 - near) : parted + 1]
        if parted - last_found >= near and not self.kv.states.worth.was_left(ends):
            kept.add(parted)
        return kept, prompt_end

    def grow(self, sequence: Sequence, num_new: int) -> tuple[Appended, ...] | None:
        """Give a running sequence room for its next tokens, as `start` does. What sources hold is
        evicted for it."""
        blocks, num_unsure = sequence.blocks, sequence.num_tried_tokens
        blocks.advance(sequence.num_computed_tokens)
        grow = self.kv.allocate_slots
        while (appended := grow(blocks, num_new, num_unsure=num_unsure)) is None:
            if not self.evict_one():
                return None
        self._note_copies(appended)
        return appended

    def grow_by_guesses(
        self, sequence: Sequence, num: int, reserve: int = 0
    ) -> tuple[Appended, ...] | None:
        """Give a running sequence room for so many guesses behind what the plan that is being made
        computes; what changed by cache group, None if there are too few blocks. reserve: how many
        are to be left of each group."""
        num_computed, grow = sequence.num_computed_tokens, self.kv.append_guesses
        while (appended := grow(sequence.blocks, num_computed, num, reserve)) is None:
            if not self.evict_one():
                return None
        self._note_copies(appended)
        return appended

    def take_back(self, sequence: Sequence) -> bool:
        """Free the room of guesses that were wrong, and states that were passed by right ones;
        whether there is less room now."""
        num_tokens, blocks = sequence.num_computed_tokens, sequence.blocks
        had_more = blocks.num_tokens > num_tokens
        if had_more:
            self.kv.truncate(blocks, num_tokens)
        if self.kv.has_states:
            blocks.advance(num_tokens)
            self.kv.states.end_guesses(blocks.tables)
        return had_more

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child hold what its parent holds. They share it until one of them writes."""
        child.blocks = self.kv.fork(parent.blocks)

    def free(self, sequence: Sequence) -> None:
        """Free what a sequence holds on the device."""
        self.kv.free(sequence.blocks)

    def name_full_blocks(self, sequences: Seq[Sequence], counts: Seq[int]) -> list[list[list[int]]]:
        """Enter the first `count` blocks of each in the index; the new ones, by cache group, of
        each."""
        self.names.extend(sequences, counts)
        firsts = [s.blocks.num_indexed for s in sequences] if self._named else ()
        index = self.kv.index_blocks
        pairs = zip(sequences, counts, strict=True)
        named = [index(s.blocks, s.digests, num) for s, num in pairs]
        for _, note in self._named:
            note(sequences, firsts, counts, named)
        return named

    # ---- host memory -------------------------------------------------------------------------

    def swap_out(self, members: Seq[Sequence]) -> list[Copies] | None:
        """Exchange what these hold for host blocks; the copies by cache group, None if host memory
        has no room."""
        done = swap_out(self.kv, [member.blocks for member in members])
        if done is None:
            return None
        for member, blocks in zip(members, done[0], strict=True):
            member.host_blocks = blocks
        return done[1]

    def swap_in(self, members: Seq[Sequence]) -> list[Copies]:
        """Exchange them back. The device must have the blocks."""
        blocks, copies = swap_in(self.kv, [member.swapped for member in members])
        for member, mine in zip(members, blocks, strict=True):
            member.blocks, member.host_blocks = mine, None
        return copies

    def free_swapped(self, sequence: Sequence) -> None:
        """Free what a sequence holds in host memory, if it does."""
        if sequence.host_blocks is not None:
            self.kv.free(sequence.host_blocks)
            sequence.host_blocks = None

    def undo(self, member: Sequence, copies: Iterable[tuple[int, int, int, int]]) -> None:
        """Take back what the plan that is being made has done to the member's tables. copies: of
        this plan, on write: group, row, from, to. They have not been carried out, and their sources
        are still held by those who share them."""
        for group, row, source, destination in copies:
            if row == member.row:
                pool, table = self.kv.pools[group], member.blocks.tables[group]
                table.blocks[table.blocks.index(destination)] = source
                pool.acquire(source)
                pool.release(destination)
        num_tokens = member.num_kept_tokens
        if member.blocks.num_tokens > num_tokens:
            self.kv.truncate(member.blocks, num_tokens)
        member.blocks.advance(num_tokens)

    def settle(self, step_id: int) -> list[Name]:
        """Take what the plan of this step has copied to host memory as being there."""
        return [] if self.kv.tier is None else self.kv.tier.settle(step_id)

    def copies_out(self) -> list[Copies]:
        """Find host blocks for what the plan that is being made evicts, and for what stores wait
        for; the copies, by cache group."""
        if self.kv.tier is None:
            return []
        copies = self.kv.tier.take_evicted()
        for _, add in self._copying:
            add(copies)
        return copies

    def end_plan(self, step_id: int, now: float) -> None:
        """Note that a plan is made: what it copies belongs to it."""
        if self.kv.has_states:
            self.kv.states.end_plan()
        self.end_turn(now)
        if self.kv.tier is not None:
            self.kv.tier.end_plan(step_id)

    def end_turn(self, now: float) -> None:
        """Note that a plan is made, or that nobody could compute anything."""
        for blocks in self.spent:
            self.kv.free(blocks)
        for g, block_id in self.kept_copied:
            self.kv.pools[g].release(block_id)
        self.copied, self.kept_copied, self.spent = [], [], []
        for _, end in self._planned:
            end(now)

    def free_after_plan(self, blocks: SequenceBlocks) -> None:
        """Free tables that the plan being made may copy from: a plan may write into blocks that are
        freed while it is made, and writes what it loads before it copies."""
        self.kv.set_evictable(blocks, False)
        self.spent.append(blocks)

    def _note_copies(self, appended: Seq[Appended]) -> None:
        """Take note of what a row of the plan that is being made copies, by cache group."""
        for g, one in enumerate(appended):
            for source, _ in one.copies:
                self.copied.append((g, source))

    # ---- what is not to be used --------------------------------------------------------------

    def distrust(self, blocks: Seq[Iterable[int]]) -> None:
        """Take the names of these blocks, by cache group, and of all that is being copied out."""
        self.kv.unindex_blocks(blocks)
        if self.kv.tier is not None:
            self.kv.tier.forget_unsettled()

    def forget(self, sequence: Sequence) -> None:
        """Take away all that the index has of a sequence's tokens."""
        self.kv.forget(sequence.digests)

    def reset(self, fingerprint: bytes, now: float) -> None:
        """Forget all names; those to come begin with this fingerprint."""
        self.kv.reset_prefix_cache()
        for listener in self.listeners:
            listener.reset(now)
        self.names.fingerprint = fingerprint
