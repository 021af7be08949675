"""Prefix blocks in external stores, as far as the scheduler knows them (C7).

A new request is looked up in every store if its prompt is not all on the device or in host memory.
It is parked meanwhile, outside the queue. Found blocks are fetched into host blocks if that is
faster than computing them. Then they belong to the host tier, and the request enters the queue.

    add -> LookUp -> LookedUp -> wait for room -> Fetch -> Fetched -> queue -> hit in host memory
                        |                                      |                      -> load
                        +----------- no blocks found ----------+-----> queue

Every store keeps the blocks that enter the host tier, once the step that copies them has ended.
These are evicted blocks, and blocks that `offers.py` copies as soon as they are computed. If
another engine is computing the prompt (`KVTransfer.waits`), the look-up repeats as long as new
blocks arrive, until all have arrived. Each time a store has new blocks, these are fetched while the
rest is computed elsewhere. The orders are carried out by `engine/connectors`. Each order is
answered once, by a control message, which is the only information about a store. If a row fails,
all blocks of its tokens are removed from stores (`Remove`). A fetch in flight does not add them to
the host tier.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from quire.base.kv_orders import (
    BlockName,
    Fetch,
    Fetched,
    Item,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Remove,
)
from quire.base.messages import KeepCached, ResetPrefixCache
from quire.base.plan import Plan
from quire.base.settings.kv_transfer import COMPUTED, EVICTED, NOTHING, HandedOver
from quire.kv.host_tier import HostTier, Name
from quire.kv.manager import KVBlocks
from quire.scheduler.core.extension import Extension, Handler, HitSource, StepEnd, StepExtension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import PROMPT_TAIL, Memory
from quire.scheduler.core.planning import Planner
from quire.scheduler.core.sequence import NEVER, Sequence
from quire.scheduler.reuse.keeping import HostHolds, Keeping, Tickets
from quire.scheduler.reuse.offers import Offers
from quire.scheduler.reuse.partial_blocks import PartialBlocks
from quire.scheduler.views import StoresView

WAIT_S = 1.5  # for a block that another engine is about to keep
FETCHING_SHARE = 2  # fetches in flight take at most 1/FETCHING_SHARE of a group's host memory
ROOM_SHARE = 4  # a fetch waits for at most 1/ROOM_SHARE of a group's host memory to be free
OLD_RATE_WEIGHT = 0.5  # weight of the old average when a new rate is measured


class StoreBlocker(StrEnum):
    """Reason why a sequence waits outside the queue."""

    REQUESTED = "asked"  # stores may have blocks of its prompt


class StoreHit(StrEnum):
    """Kind of a prefix hit in `Sequence.found_elsewhere`."""

    EXPECTED = "expected"  # the hit after the last look-up, which may be lost before admission


@dataclass(slots=True)
class PendingLookup:
    """Request in a look-up or fetch. names: its blocks that were not cached here. is_handed_over:
    another engine may be sending them to the stores. is_again: it had lost blocks while it was
    queued. requested: names of unanswered look-ups, by ticket. found: a store that has the block.
    tickets: unanswered fetches. waits_for: last ticket of the fetches that its own waits for."""

    sequence: Sequence
    names: dict[BlockName, None]
    is_handed_over: bool = False
    is_again: bool = False
    requested: dict[int, tuple[BlockName, ...]] = field(default_factory=dict)
    found: dict[BlockName, int] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)
    waits_for: int | None = None


class Stores(HitSource, Extension, StepExtension):
    """Extension that looks up, fetches and keeps blocks in stores. num_stores: they are looked up
    in this order. kept: the blocks that stores receive (base/settings/kv_transfer.py). orders: list
    for new orders. offers: offers of computed blocks; None if stores receive no blocks. partial:
    names of last blocks that are not full; None if they have no names."""

    follows_steps = True
    entries = (True,)  # never empty, so that `begin` is called for each admission

    def __init__(
        self,
        memory: Memory,
        lifecycle: Lifecycle,
        planner: Planner,
        orders: list[Order],
        num_stores: int,
        kept: str = EVICTED,
        partial: PartialBlocks | None = None,
    ) -> None:
        self.num_stores = num_stores
        self._partial = partial
        self.kept = kept
        self.orders = orders
        self.offers: Offers | None = None
        self.waiting: dict[str, PendingLookup] = {}
        self.num_fetched = self.num_kept = 0
        self.num_fetched_bytes = self.num_kept_bytes = self.num_here = 0
        self.is_private = False  # whether other engines cannot know the names of this cache
        self._memory, self._lifecycle, self._planner = memory, lifecycle, planner
        self._is_ending = False  # whether all cached blocks are to be kept before the engine ends
        self._fetching: dict[int, tuple[Item, ...]] = {}
        self._deferred: dict[str, PendingLookup] = {}  # fetches without room, by request id
        self._coming: dict[BlockName, int] = {}  # ticket of the fetch, of the blocks still needed
        self._bytes_per_s = [0.0] * num_stores  # rate of fetching; 0.0 if unknown
        self._tickets = Tickets()
        sizes = memory.kv.block_bytes
        self._keeping = Keeping(self._tier, orders, num_stores, sizes, self._tickets)
        self._holds = HostHolds(self._tier)
        if self.keeps:
            self.offers = Offers(memory.kv, self._tier, kept == COMPUTED, self)

    # ---- as an extension -----------------------------------------------------------------------

    def handlers(self) -> Mapping[type, Handler]:
        """See Extension."""
        return {
            LookedUp: lambda answer, now: self._take_looked_up(answer),
            Fetched: lambda answer, now: self._take_fetched(answer),
            Kept: lambda answer, now: self._take_kept(answer),
            KeepCached: self._begin_ending,
            ResetPrefixCache: lambda message, now: self.start_over(),
        }

    def enter(self, sequence: Sequence, now: float) -> None:
        """See Extension: a request with look-ups waits outside the queue."""
        if not sequence.has_something_to_compute or not self._begin_wait(sequence):
            self._expect(sequence)

    def prepare(self, sequence: Sequence) -> bool:
        """See HitSource. A request may wait in the queue until host memory has lost its blocks. It
        is then looked up again."""
        _, num_expected = sequence.found_elsewhere.get(StoreHit.EXPECTED, (0, 0))
        if not num_expected or self._num_here(sequence) >= num_expected:
            return True
        self._hold(sequence)
        if self._begin_wait(sequence, is_again=True):
            self._lifecycle.park(sequence)
            return False
        self._expect(sequence)
        return True

    def begin(self, sequence: Sequence, hit: KVBlocks, now: float) -> None:
        """See HitSource: the plan holds the blocks that it loads."""
        self._holds.release(sequence.request.request_id)

    def _hold(self, sequence: Sequence) -> None:
        """Hold the prefix of a request in host memory until it is admitted."""
        digests, _ = self._memory.names.readable(sequence)
        groups = range(len(self._memory.kv.groups))
        names = ((g, digest) for digest in digests for g in groups)
        self._holds.hold(sequence.request.request_id, names)

    def _begin_wait(self, sequence: Sequence, is_again: bool = False) -> bool:
        """Look up a request. Return whether it waits for that."""
        if not self.look_up(sequence, is_again):
            return False
        sequence.watch(self)
        sequence.blockers |= {StoreBlocker.REQUESTED}
        return True

    def _num_here(self, sequence: Sequence) -> int:
        """Return the length of the hit on the device and in host memory, in tokens."""
        kv = self._memory.kv
        return kv.num_computed_blocks(*self._memory.names.readable(sequence)) * kv.block_size

    def _expect(self, sequence: Sequence) -> None:
        """Record the hit that a sequence would have now."""
        sequence.found_elsewhere[StoreHit.EXPECTED] = 0, self._num_here(sequence)

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """See Extension."""
        members = [member for sequence in failed for member in sequence.members]
        digests = [digest for member in members for digest in member.digests]
        if self._partial is not None:
            digests += [name for member in members for name in self._partial.names_in(member)]
        self.remove(list(dict.fromkeys(digests)))

    def end_step(self, end: StepEnd, now: float) -> None:
        """See StepExtension: keep the blocks copied to host memory by this step, and report the
        blocks handed over for each ended prompt."""
        self._keep(end.settled, int(NEVER) if end.is_flush else None)
        for sequence, update in end.outputs.ended:
            finish = update.finish
            if finish is not None and finish.reason in ("stop", "length"):
                update.handed_over = self.handed_over(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a plan is needed that copies blocks for stores."""
        return self.offers is not None and (self.offers.num_waiting > 0 or self._tier.has_held)

    def idle_plan(self, now: float) -> Plan | None:
        """See StepExtension. Drop offered blocks that cannot be copied while no order is in flight.
        Before the engine ends, copy all cached blocks, unless only this engine could use them."""
        if self._is_ending and self.keeps and not self.is_private:
            plan = self._planner.flush(now)
            if plan is not None:
                return plan
        if self.offers is None or not self.has_work:
            return None
        plan = self._planner.offload(now)
        if plan is None and self._keeping.backlog == 0:
            self.offers.drop_waiting()
        return plan

    def _begin_ending(self, message: KeepCached, now: float) -> None:
        """Copy all cached blocks to stores from now on, whenever nothing else can be planned."""
        self._is_ending = True

    def handed_over(self, sequence: Sequence) -> HandedOver | None:
        """Return the blocks of a prompt that go to the stores for another engine; None if its
        request does not need this."""
        transfer = sequence.request.kv_transfer
        if transfer is None or not transfer.keeps or self.offers is None:
            return None
        num = min(sequence.num_prompt_tokens // self._memory.block_size, len(sequence.digests))
        return HandedOver(num, sequence.digests[num - 1] if num else b"", transfer.address)

    @property
    def keeps(self) -> bool:
        """Whether stores receive blocks."""
        return self.kept != NOTHING

    @property
    def room(self) -> int:
        """Number of further offered blocks that may be copied out now. Evicted blocks do not
        count, since offered ones are ordered first."""
        num_copying = 0 if self.offers is None else self.offers.num_copying
        return self._keeping.max_blocks - self._keeping.num_offered - num_copying

    def view(self) -> StoresView:
        return StoresView(
            self.num_fetched,
            self.num_kept,
            self.num_fetched_bytes,
            self.num_kept_bytes,
            self.num_here,
        )

    @property
    def _tier(self) -> HostTier:
        tier = self._memory.kv.tier
        assert tier is not None, "stores need host blocks"
        return tier

    def held_blocks(self, cache_group: int) -> list[int]:
        """Return the host blocks that orders in flight name."""
        fetching = self._fetching.values()
        blocks = [block for items in fetching for g, _, block in items if g == cache_group]
        held = self._keeping.held_blocks(cache_group) + self._holds.held_blocks(cache_group)
        return blocks + held

    # ---- looking up and fetching -------------------------------------------------------------

    def look_up(self, sequence: Sequence, is_again: bool = False) -> bool:
        """Look up a new request, if stores may have more of its prompt. Return whether it must
        wait. is_again: it has lost blocks since its last look-up."""
        kv = self._memory.kv
        digests, num_tokens = self._memory.names.readable(sequence)
        max_blocks = min(len(digests), (num_tokens - 1) // kv.block_size)
        here = 0 if sequence.is_open else kv.num_computed_blocks(digests, num_tokens)
        is_handed_over = self._is_handed_over(sequence, digests)
        enough = self._num_to_come(sequence) if is_handed_over else max_blocks
        if sequence.is_open or here >= enough:
            return False
        # Groups that keep all blocks come first. Of other groups, stores may lack some blocks.
        order = sorted(range(len(kv.groups)), key=lambda g: not kv.groups[g].keeps_all)
        names = tuple(
            (g, digest)
            for g in order
            for digest in digests[here if kv.groups[g].keeps_all else 0 : max_blocks]
            if not kv.is_cached(g, digest)
        )
        transfer = sequence.request.kv_transfer
        requested = () if transfer is None or not is_handed_over else transfer.stores
        some = requested or range(self.num_stores)
        stores = [i for i in some if is_handed_over or self._is_faster(i, names, num_tokens)]
        if not stores:
            return False
        self.num_here += max_blocks * len(kv.groups) - len(names)
        if self._partial is not None:
            num_before = self._partial.num_blocks_before(sequence)
            names += tuple(chain(*self._partial.to_fetch(sequence, num_before)))
        wait = PendingLookup(sequence, dict.fromkeys(names), is_handed_over, is_again)
        self.waiting[sequence.request.request_id] = wait
        for store in stores:
            self._look_up(wait, store, names)
        return True

    def _look_up_lost(self, wait: PendingLookup, num_blocks: int) -> bool:
        """Look up the blocks that were here at the request's look-up and are lost since. Hold the
        others. num_blocks: leading blocks that are here or found. Return whether there are any."""
        if wait.is_handed_over:
            return False
        sequence = wait.sequence
        digests, num_tokens = self._memory.names.readable(sequence)
        max_blocks = min(len(digests), (num_tokens - 1) // self._memory.block_size)
        lost = self._lost(wait, digests[:max_blocks], num_blocks)
        stores = [i for i in range(self.num_stores) if self._is_faster(i, lost, num_tokens)]
        if not lost or not stores:
            return False
        wait.is_again = True
        self._hold(sequence)
        wait.names |= dict.fromkeys(lost)
        for store in stores:
            self._look_up(wait, store, lost)
        return True

    def _lost(self, wait: PendingLookup, digests: Seq[bytes], start: int) -> tuple[BlockName, ...]:
        """Return the names from block `start` on that are neither here nor looked up. No block is
        of use after one that no store has, in a cache group that keeps all blocks."""
        kv, lost = self._memory.kv, list[BlockName]()
        for g, group in enumerate(kv.groups):
            seen = kv.first_seen(g, start * kv.block_size)
            for digest in digests[start if group.keeps_all else seen :]:
                name = (g, digest)
                if kv.is_cached(g, digest) or name in wait.found:
                    continue
                if name not in wait.names:
                    lost.append(name)
                elif group.keeps_all:
                    break
        return tuple(lost)

    def _is_handed_over(self, sequence: Sequence, digests: Seq[bytes]) -> bool:
        """Return whether another engine keeps this prompt's blocks now or soon. Its digest must
        match the prompt: blocks of another prompt or model never arrive."""
        transfer = sequence.request.kv_transfer
        if transfer is None or not transfer.waits:
            return False
        num = transfer.num_blocks
        return num == 0 or (num <= len(digests) and digests[num - 1] == transfer.digest)

    def _look_up(self, wait: PendingLookup, store: int, names: tuple[BlockName, ...]) -> None:
        """Order a look-up of these names in a store."""
        ticket, wait_s = self._tickets.next(), WAIT_S if wait.is_handed_over else 0.0
        wait.requested[ticket] = names
        request_id = wait.sequence.request.request_id
        self.orders.append(LookUp(store, request_id, names, ticket, wait_s))

    def _num_to_come(self, sequence: Sequence) -> int:
        """Return the number of blocks that may arrive for a handed-over prompt. With states, no
        sequence can begin after the last stored state, so blocks after it do not count."""
        size, transfer = self._memory.block_size, sequence.request.kv_transfer
        num_tokens = sequence.num_known_tokens - 1
        if self._memory.kv.has_states:
            num_tokens = max(0, num_tokens - PROMPT_TAIL)
        num_announced = 0 if transfer is None else transfer.num_blocks
        return min(num_tokens // size, num_announced or num_tokens // size)

    def forget(self, sequence: Sequence) -> None:
        """Forget a request that has ended. Fetches in flight for it continue."""
        self.waiting.pop(sequence.request.request_id, None)
        self._deferred.pop(sequence.request.request_id, None)
        self._holds.release(sequence.request.request_id)

    def _take_looked_up(self, answer: LookedUp) -> None:
        wait = self.waiting.get(answer.request_id)
        if wait is None or answer.ticket not in wait.requested:
            return  # the request has ended; its id may have been reused
        names, num_before = wait.requested.pop(answer.ticket), len(wait.found)
        for name, is_there in zip(names, answer.found, strict=True):
            if is_there:
                wait.found.setdefault(name, answer.store)
        if wait.is_handed_over:
            self._continue_fetching(wait, answer.store, len(wait.found) > num_before)
        elif not wait.requested:
            self._fetch(wait)
        self._end_wait(wait)

    def _continue_fetching(self, wait: PendingLookup, store: int, is_growing: bool) -> None:
        """Fetch the new blocks of a handed-over prompt, and look up the rest in a store that had
        new ones. Once all blocks are found, stop waiting for other stores."""
        if is_growing:
            self._fetch(wait)
        kv = self._memory.kv
        digests, num_tokens = self._memory.names.readable(wait.sequence)
        there = kv.num_computed_blocks(
            digests, num_tokens, lambda g, name: (g, name) in wait.found or kv.is_cached(g, name)
        )
        if there >= self._num_to_come(wait.sequence):
            wait.requested.clear()
        elif is_growing:
            names = tuple(name for name in wait.names if name not in wait.found)
            self._look_up(wait, store, names)

    def _fetch(self, wait: PendingLookup) -> None:
        """Order fetches of the blocks that make the hit longer."""
        if not wait.found:
            return
        kv, sequence = self._memory.kv, wait.sequence
        digests, num_tokens = self._memory.names.readable(sequence)
        here = kv.num_computed_blocks(digests, num_tokens)
        there = kv.num_computed_blocks(
            digests, num_tokens, lambda g, name: (g, name) in wait.found or kv.is_cached(g, name)
        )
        if self._look_up_lost(wait, there) or there <= here:
            return
        lacking = [
            (g, digests[i])
            for i in range(there)
            for g in range(len(kv.groups))
            if i >= kv.first_seen(g, there * kv.block_size) and not kv.is_cached(g, digests[i])
        ]
        lacking += self._partial_to_fetch(wait, there)
        if not (wait.is_handed_over or self._has_room(wait, lacking)):
            self._deferred[sequence.request.request_id] = wait
            return
        wait.waits_for = None
        # The fetched blocks must not evict those before them.
        names = [(g, d) for d in reversed(digests[:there]) for g in range(len(kv.groups))]
        held = [(g, self._tier.borrow(g, digest)) for g, digest in names]
        num_new = (there - here) * kv.block_size
        for store in range(self.num_stores):
            mine = [name for name in lacking if wait.found.get(name) == store]
            is_needed = wait.is_handed_over or self._is_faster(store, mine, num_new)
            if mine and is_needed:
                self._order(wait, store, mine)
        for g, block in held:
            if block is not None:
                self._tier.release(g, block)

    def _has_room(self, wait: PendingLookup, names: list[BlockName]) -> bool:
        """Return whether to fetch these blocks now. Fetches take at most a share of host memory, so
        that evicted blocks find room. A fetch waits for earlier fetches. While a store writes, it
        also waits for free host blocks, but for no more than writes and holds always leave free."""
        counts = Counter(name[0] for name in names if name not in self._coming)
        if counts and self._deferred:
            return False
        if (last := wait.waits_for) is None:
            last = wait.waits_for = self._tickets.last
        earlier = [item for t, items in self._fetching.items() if t <= last for item in items]
        fetching = Counter(g for g, _, _ in earlier)
        is_due, tier = bool(earlier) or self._keeping.backlog > 0, self._tier
        for g, num in counts.items():
            too_many = fetching[g] + num > tier.limits[g] // FETCHING_SHARE
            needed = min(num, tier.limits[g] // ROOM_SHARE)
            if (fetching[g] and too_many) or (is_due and needed > tier.room(g)):
                return False
        return True

    def _fetch_deferred(self) -> None:
        """Order the deferred fetches that have room now, the oldest request first."""
        deferred, self._deferred = self._deferred, {}
        rest = iter(sorted(deferred.items(), key=lambda item: item[1].sequence.arrival))
        for _, wait in rest:
            self._fetch(wait)
            self._end_wait(wait)
            if self._deferred:
                break
        self._deferred |= rest

    def _partial_to_fetch(self, wait: PendingLookup, num_blocks: int) -> list[BlockName]:
        """Return the names to fetch of the longest partial block after these full blocks that is
        found."""
        if self._partial is None:
            return []
        for names in self._partial.to_fetch(wait.sequence, num_blocks):
            if all(name in wait.found for name in names):
                return names
        return []

    def _order(self, wait: PendingLookup, store: int, names: list[BlockName]) -> None:
        """Order a fetch of the blocks that are not in flight, as far as host memory has room."""
        tier, items = self._tier, []
        for name in names:
            if name in self._coming:
                wait.tickets.add(self._coming[name])
                continue
            block = tier.allocate(name[0])
            if block is None:
                break
            items.append((*name, block))
        if items:
            ticket = self._tickets.next()
            self._fetching[ticket] = tuple(items)
            self._coming.update({(g, digest): ticket for g, digest, _ in items})
            wait.tickets.add(ticket)
            self.orders.append(Fetch(store, ticket, tuple(items)))

    def _take_fetched(self, answer: Fetched) -> None:
        items = self._fetching.pop(answer.ticket, None)
        if items is None:
            return
        for (g, digest, block), is_there in zip(items, answer.ok, strict=True):
            if is_needed := self._coming.get((g, digest)) == answer.ticket:
                del self._coming[g, digest]
            is_taken = is_there and is_needed
            self._tier.keep_fetched(g, block, digest if is_taken else None)
            self.num_fetched += is_taken
        self.num_fetched_bytes += answer.num_bytes
        if answer.num_bytes and answer.duration_s > 0:
            self._measure(answer.store, answer.num_bytes / answer.duration_s)
        num_found = sum(ok for (g, _, _), ok in zip(items, answer.ok, strict=True) if g == 0)
        for wait in list(self.waiting.values()):
            if answer.ticket in wait.tickets:
                wait.tickets.remove(answer.ticket)
                wait.sequence.num_fetched_blocks += num_found
            self._end_wait(wait)
        self._fetch_deferred()

    def _end_wait(self, wait: PendingLookup) -> None:
        """Queue a request once no look-up or fetch is outstanding."""
        is_deferred = wait.sequence.request.request_id in self._deferred
        if wait.requested or wait.tickets or is_deferred:
            return
        if not self._look_up_lost(wait, self._num_here(wait.sequence) // self._memory.block_size):
            self._finish_wait(wait)

    def _finish_wait(self, wait: PendingLookup) -> None:
        """Queue a request that waits for stores."""
        sequence = wait.sequence
        del self.waiting[sequence.request.request_id]
        if wait.is_again:
            self._hold(sequence)
        self._expect(sequence)
        sequence.blockers -= {StoreBlocker.REQUESTED}
        self._lifecycle.unpark(sequence)

    # ---- removing blocks ---------------------------------------------------------------------

    def start_over(self) -> None:
        """Start over after all names have changed. Waiting requests continue without stores, and
        fetches in flight are dropped. From now on, stores only extend the memory of this engine."""
        self.is_private = True
        self._holds.release_all()
        self._coming, self._deferred = {}, {}
        for wait in list(self.waiting.values()):
            wait.requested, wait.tickets = {}, set()
            self._finish_wait(wait)
        for sequence in self._lifecycle.sequences.values():
            sequence.found_elsewhere.pop(StoreHit.EXPECTED, None)

    def remove(self, digests: list[bytes]) -> None:
        """Order the removal of blocks that a failed request may have computed wrongly.

        `keep` excludes copies of steps with errors. But an error shows only when a token is
        sampled, which may be long after the copy. Fetches in flight of these blocks are dropped,
        too.
        """
        names = tuple((g, digest) for digest in digests for g in range(len(self._memory.kv.groups)))
        if self.offers is not None:
            self.offers.forget(names)
        for name in names:
            self._coming.pop(name, None)
            for wait in self.waiting.values():
                wait.found.pop(name, None)
        for store in range(self.num_stores if names else 0):
            self.orders.append(Remove(store, self._tickets.next(), names))

    # ---- keeping -----------------------------------------------------------------------------

    def _keep(self, names: list[Name], max_blocks: int | None = None) -> None:
        """Let the stores keep blocks of the host tier. max_blocks: maximum number in flight; None:
        the usual one."""
        if names and self.offers is not None:
            self._keeping.keep(names, max_blocks, self.offers.take_copied(names))

    def _take_kept(self, answer: Kept) -> None:
        items = self._keeping.take(answer.store, answer.ticket)
        self.num_kept += sum(answer.ok[: len(items)])
        self.num_kept_bytes += answer.num_bytes
        if self.offers is not None:
            pairs = zip(items, answer.ok, strict=False)
            kept = [(g, digest) for (g, digest, _), ok in pairs if ok]
            self.offers.take_kept(kept, answer.is_lasting)
        self._fetch_deferred()

    # ---- rates -------------------------------------------------------------------------------

    def _is_faster(self, store: int, names: Seq[BlockName], num_tokens: int) -> bool:
        """Return whether fetching these blocks is faster than computing num_tokens tokens; True if
        a rate is unknown."""
        sizes, per_s = self._memory.kv.block_bytes, self._bytes_per_s[store]
        tokens_per_s = self._memory.rates.prefill_tokens_per_s
        if not (sizes and per_s and tokens_per_s):
            return True
        return sum(sizes[g] for g, _ in names) / per_s < num_tokens / tokens_per_s

    def _measure(self, store: int, bytes_per_s: float) -> None:
        known = self._bytes_per_s[store] or bytes_per_s
        self._bytes_per_s[store] = OLD_RATE_WEIGHT * known + (1 - OLD_RATE_WEIGHT) * bytes_per_s
