"""Prefixes in stores outside of this process, as far as the scheduler knows of them (C7).

A request whose prompt is not all on the device or in host memory is looked up in every store when
it comes, and is parked meanwhile: outside the queue, in nobody's way. What was found, and takes
less time to fetch than to compute, is fetched into host blocks; with the answer these are part of
the host tier, and the request enters the queue.

    add -> LookUp -> LookedUp -> Fetch -> Fetched -> queue -> hit in host memory -> load
                        |                    |
                        +- nothing found ----+-----> queue

What the host tier takes in is kept in every store, once the step that copies it out has ended:
what is evicted, and what `offers.py` has copied as soon as it was computed. A request whose prompt
another engine computes just now (`KVTransfer.waits`) is looked up until all of it has come, as long
as blocks do come: each time a store has something new, that is fetched, while the rest is computed
elsewhere. The orders are carried out elsewhere (`engine/connectors`); every one of them is answered
once, by a control message, and nothing is known of a store but by these. A row that fails has all
blocks of its tokens removed (`Remove`): what comes of them from a fetch under way is not taken in.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from quire.base.kv_orders import (
    BlockName,
    Fetch,
    Fetched,
    Item,
    Keep,
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
from quire.scheduler.core.extension import Extension, Handler, StepEnd, StepExtension
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import PROMPT_TAIL, Memory
from quire.scheduler.core.planning import Planner
from quire.scheduler.core.sequence import NEVER, Sequence
from quire.scheduler.reuse.offers import Offers
from quire.scheduler.views import StoresView

MOST_KEPT_AT_ONCE = 256  # blocks on their way to a store; beyond that they are not kept
MOST_KEPT_BYTES = 128 << 20  # of what is kept as soon as it is computed; but one block always
WAIT_S = 1.5  # for a block that another engine is about to keep
KEEP_OLD = 0.5  # of a measured rate, when another was measured


class StoreBlocker(StrEnum):
    """What a sequence waits for outside the queue."""

    ASKED = "asked"  # stores may have blocks of its prompt


@dataclass(slots=True)
class PendingLookup:
    """A request that is looked up or fetched for. names: that are not here; is_handed_over: they
    may be on their way to the stores. asked: by ticket, what stores that have not answered were
    asked for; found: which store has a block; tickets: of fetches that have not come."""

    sequence: Sequence
    names: tuple[BlockName, ...]
    is_handed_over: bool = False
    asked: dict[int, tuple[BlockName, ...]] = field(default_factory=dict)
    found: dict[BlockName, int] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)


class Stores(Extension, StepExtension):
    """num_stores: they are asked in the order of their numbers. kept: what they get
    (base/settings/kv_transfer.py). orders: where orders go. offers: what they get as soon as it is
    computed; None if they get nothing."""

    follows_steps = True

    def __init__(
        self,
        memory: Memory,
        lifecycle: Lifecycle,
        planner: Planner,
        orders: list[Order],
        num_stores: int,
        kept: str = EVICTED,
    ) -> None:
        self.num_stores = num_stores
        self.kept = kept
        self.orders = orders
        self.offers: Offers | None = None
        self.waiting: dict[str, PendingLookup] = {}
        self.num_fetched = self.num_kept = 0
        self.num_fetched_bytes = self.num_kept_bytes = self.num_here = 0
        self.is_private = False  # the names of this cache mean nothing to other engines
        self._memory, self._lifecycle, self._planner = memory, lifecycle, planner
        self._is_ending = False  # what is cached is to be kept
        self._fetching: dict[int, tuple[Item, ...]] = {}
        self._coming: dict[BlockName, int] = {}  # with which ticket; of those that are wanted
        self._keeping: dict[int, tuple[Item, ...]] = {}
        self._num_keeping = [0] * num_stores
        self._bytes_per_s = [0.0] * num_stores  # of fetching; 0.0 is not known
        self._next_ticket = 0
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
        """See Extension: a request that is looked up waits outside the queue."""
        if sequence.has_something_to_compute and self.begin(sequence):
            sequence.watch(self)
            sequence.blockers |= {StoreBlocker.ASKED}

    def fail(self, failed: Collection[Sequence], now: float) -> None:
        """See Extension."""
        digests = (d for s in failed for member in s.members for d in member.digests)
        self.remove(list(dict.fromkeys(digests)))

    def end_step(self, end: StepEnd, now: float) -> None:
        """See StepExtension: keep what has come to host memory, and report what goes to stores of
        the prompts that have ended."""
        self.keep(end.settled, int(NEVER) if end.is_flush else None)
        for sequence, update in end.outputs.ended:
            finish = update.finish
            if finish is not None and finish.reason in ("stop", "length"):
                update.handed_over = self.handed_over(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a plan is needed that copies out what stores wait for."""
        return self.offers is not None and (self.offers.num_waiting > 0 or self._tier.has_held)

    def idle_plan(self, now: float) -> Plan | None:
        """See StepExtension. What cannot be copied though nothing is under way is given up. At the
        end all that is cached is copied, unless no other engine could use it."""
        if self._is_ending and self.keeps and not self.is_private:
            plan = self._planner.flush(now)
            if plan is not None:
                return plan
        if self.offers is None or not self.has_work:
            return None
        plan = self._planner.offload(now)
        if plan is None and self.num_keeping == 0:
            self.offers.drop_waiting()
        return plan

    def _begin_ending(self, message: KeepCached, now: float) -> None:
        """Copy out from now on, when nothing else is to be planned, all that is cached."""
        self._is_ending = True

    def handed_over(self, sequence: Sequence) -> HandedOver | None:
        """Return what of a prompt goes to the stores for another engine; None if nobody asked."""
        transfer = sequence.request.kv_transfer
        if transfer is None or not transfer.keeps or self.offers is None:
            return None
        num = min(sequence.num_prompt_tokens // self._memory.block_size, len(sequence.digests))
        return HandedOver(num, sequence.digests[num - 1] if num else b"", transfer.address)

    @property
    def keeps(self) -> bool:
        """Whether stores get anything."""
        return self.kept != NOTHING

    @property
    def num_keeping(self) -> int:
        """Count the blocks that are on their way to the store that has most of them before it."""
        return max(self._num_keeping)

    @property
    def room(self) -> int:
        """Return how many blocks more may be copied out for stores now: a worker that has too much
        to keep refuses what comes."""
        most_bytes = MOST_KEPT_BYTES // max([1, *self._memory.kv.block_bytes])
        most = min(MOST_KEPT_AT_ONCE, max(1, most_bytes))
        return most - self.num_keeping - self._tier.num_unsettled

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
        """Host blocks that orders on their way name."""
        all_items = [*self._fetching.values(), *self._keeping.values()]
        return [block for items in all_items for g, _, block in items if g == cache_group]

    # ---- looking up and fetching -------------------------------------------------------------

    def begin(self, sequence: Sequence) -> bool:
        """Look a new request up, if there is something to find; whether it has to wait."""
        kv = self._memory.kv
        digests, num_tokens = self._memory.names.readable(sequence)
        most = min(len(digests), (num_tokens - 1) // kv.block_size)
        here = 0 if sequence.is_open else kv.num_computed_blocks(digests, num_tokens)
        is_handed_over = self._is_handed_over(sequence, digests)
        enough = self._num_to_come(sequence) if is_handed_over else most
        if sequence.is_open or here >= enough:
            return False
        # Groups that keep all blocks first: of others some never come.
        order = sorted(range(len(kv.groups)), key=lambda g: not kv.groups[g].keeps_all)
        names = tuple(
            (g, digest) for g in order for digest in digests[:most] if not kv.is_cached(g, digest)
        )
        transfer = sequence.request.kv_transfer
        asked = () if transfer is None or not is_handed_over else transfer.stores
        stores = [
            store
            for store in asked or range(self.num_stores)
            if is_handed_over or self._is_worth_it(store, names, num_tokens)
        ]
        if not stores:
            return False
        self.num_here += most * len(kv.groups) - len(names)
        wait = PendingLookup(sequence, names, is_handed_over)
        self.waiting[sequence.request.request_id] = wait
        for store in stores:
            self._look_up(wait, store)
        return True

    def _is_handed_over(self, sequence: Sequence, digests: Seq[bytes]) -> bool:
        """Tell whether another engine keeps this prompt's blocks now or soon. What it told of them
        may be of another prompt or another model: these blocks never come."""
        transfer = sequence.request.kv_transfer
        if transfer is None or not transfer.waits:
            return False
        num = transfer.num_blocks
        return num == 0 or (num <= len(digests) and digests[num - 1] == transfer.digest)

    def _look_up(self, wait: PendingLookup, store: int) -> None:
        """Ask a store for what was not found yet."""
        names = tuple(name for name in wait.names if name not in wait.found)
        ticket, wait_s = self._ticket(), WAIT_S if wait.is_handed_over else 0.0
        wait.asked[ticket] = names
        request_id = wait.sequence.request.request_id
        self.orders.append(LookUp(store, request_id, names, ticket, wait_s))

    def _num_to_come(self, sequence: Sequence) -> int:
        """Count the blocks of a prompt that was handed over which may come. Behind the last state
        that is left there is nothing to begin with."""
        size, transfer = self._memory.block_size, sequence.request.kv_transfer
        num_tokens = sequence.num_known_tokens - 1
        if self._memory.kv.has_states:
            num_tokens = max(0, num_tokens - PROMPT_TAIL)
        told = 0 if transfer is None else transfer.num_blocks
        return min(num_tokens // size, told or num_tokens // size)

    def forget(self, sequence: Sequence) -> None:
        """Forget a request that has ended; what is on its way for it still comes."""
        self.waiting.pop(sequence.request.request_id, None)

    def _take_looked_up(self, answer: LookedUp) -> None:
        wait = self.waiting.get(answer.request_id)
        if wait is None or answer.ticket not in wait.asked:
            return  # of a request that has ended; its id may be another's now
        names, num_before = wait.asked.pop(answer.ticket), len(wait.found)
        for name, is_there in zip(names, answer.found, strict=True):
            if is_there:
                wait.found.setdefault(name, answer.store)
        if wait.is_handed_over:
            self._go_on(wait, answer.store, len(wait.found) > num_before)
        elif not wait.asked:
            self._fetch(wait)
        self._end_wait(wait)

    def _go_on(self, wait: PendingLookup, store: int, is_growing: bool) -> None:
        """Fetch what has come of a prompt that is handed over, and ask on for the rest where there
        was something new. If there is no rest, other stores are not waited for."""
        if is_growing:
            self._fetch(wait)
        kv = self._memory.kv
        digests, num_tokens = self._memory.names.readable(wait.sequence)
        there = kv.num_computed_blocks(
            digests, num_tokens, lambda g, name: (g, name) in wait.found or kv.is_cached(g, name)
        )
        if there >= self._num_to_come(wait.sequence):
            wait.asked.clear()
        elif is_growing:
            self._look_up(wait, store)

    def _fetch(self, wait: PendingLookup) -> None:
        """Order the blocks that make the hit longer."""
        kv, sequence = self._memory.kv, wait.sequence
        digests, num_tokens = self._memory.names.readable(sequence)
        here = kv.num_computed_blocks(digests, num_tokens)

        def has(g: int, digest: bytes) -> bool:
            return (g, digest) in wait.found or kv.is_cached(g, digest)

        there = kv.num_computed_blocks(digests, num_tokens, has)
        if there <= here:
            return
        lacking = [
            (g, digests[i])
            for i in range(there)
            for g in range(len(kv.groups))
            if i >= kv.first_seen(g, there * kv.block_size) and not kv.is_cached(g, digests[i])
        ]
        num_new = (there - here) * kv.block_size
        for store in range(self.num_stores):
            mine = [name for name in lacking if wait.found.get(name) == store]
            is_wanted = wait.is_handed_over or self._is_worth_it(store, mine, num_new)
            if mine and is_wanted:
                self._order(wait, store, mine)

    def _order(self, wait: PendingLookup, store: int, names: list[BlockName]) -> None:
        """Fetch those that are not on their way; if host memory is full, the first of them."""
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
            ticket = self._ticket()
            self._fetching[ticket] = tuple(items)
            self._coming.update({(g, digest): ticket for g, digest, _ in items})
            wait.tickets.add(ticket)
            self.orders.append(Fetch(store, ticket, tuple(items)))

    def _take_fetched(self, answer: Fetched) -> None:
        items = self._fetching.pop(answer.ticket, None)
        if items is None:
            return
        for (g, digest, block), is_there in zip(items, answer.ok, strict=True):
            is_wanted = self._coming.get((g, digest)) == answer.ticket
            if is_wanted:
                del self._coming[g, digest]
            is_taken = is_there and is_wanted
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

    def _end_wait(self, wait: PendingLookup) -> None:
        """Let a request into the queue if nothing is to come for it."""
        if wait.asked or wait.tickets:
            return
        del self.waiting[wait.sequence.request.request_id]
        wait.sequence.blockers -= {StoreBlocker.ASKED}
        self._lifecycle.unpark(wait.sequence)

    # ---- what is not to be used --------------------------------------------------------------

    def start_over(self) -> None:
        """Start over, since all names have changed: those that wait go on without, and what is on
        its way is not taken in. From now on stores only hold what this engine's memory has no room
        for."""
        self.is_private = True
        self._coming = {}
        for wait in list(self.waiting.values()):
            wait.asked, wait.tickets = {}, set()
            self._end_wait(wait)

    def remove(self, digests: list[bytes]) -> None:
        """Have these blocks removed, which a request that failed may have computed wrongly.

        `keep` only orders what a step copied out that had no error; but an error shows where
        something is sampled, and that may be long after. Nor are they taken in from where they are
        on their way.
        """
        names = tuple((g, digest) for digest in digests for g in range(len(self._memory.kv.groups)))
        if self.offers is not None:
            self.offers.forget(names)
        for name in names:
            self._coming.pop(name, None)
            for wait in self.waiting.values():
                wait.found.pop(name, None)
        for store in range(self.num_stores if names else 0):
            self.orders.append(Remove(store, self._ticket(), names))

    # ---- keeping -----------------------------------------------------------------------------

    def keep(self, names: list[Name], most: int | None = None) -> None:
        """Order blocks of the host tier to be kept. most: at once, if not the usual number."""
        for store in range(self.num_stores if names and self.keeps else 0):
            room = max(0, (most or MOST_KEPT_AT_ONCE) - self._num_keeping[store])
            items = []
            for g, digest in names[:room]:
                block = self._tier.borrow(g, digest)
                if block is not None:
                    items.append((g, digest, block))
            if items:
                ticket = self._ticket()
                self._keeping[ticket] = tuple(items)
                self._num_keeping[store] += len(items)
                self.orders.append(Keep(store, ticket, tuple(items)))

    def _take_kept(self, answer: Kept) -> None:
        items = self._keeping.pop(answer.ticket, ())
        self._num_keeping[answer.store] -= len(items)
        self.num_kept += sum(answer.ok[: len(items)])
        self.num_kept_bytes += answer.num_bytes
        if self.offers is not None:
            pairs = zip(items, answer.ok, strict=False)
            kept = [(g, digest) for (g, digest, _), ok in pairs if ok]
            self.offers.take_kept(kept, answer.is_lasting)
        for g, _, block in items:
            self._tier.release(g, block)

    # ---- rates -------------------------------------------------------------------------------

    def _is_worth_it(
        self, store: int, names: "list[BlockName] | tuple[BlockName, ...]", num_tokens: int
    ) -> bool:
        """Tell whether fetching these blocks takes less time than computing so many tokens; yes, if
        one of the rates is not known."""
        sizes, per_s = self._memory.kv.block_bytes, self._bytes_per_s[store]
        tokens_per_s = self._memory.rates.prefill_tokens_per_s
        if not (sizes and per_s and tokens_per_s):
            return True
        return sum(sizes[g] for g, _ in names) / per_s < num_tokens / tokens_per_s

    def _measure(self, store: int, bytes_per_s: float) -> None:
        known = self._bytes_per_s[store] or bytes_per_s
        self._bytes_per_s[store] = KEEP_OLD * known + (1 - KEEP_OLD) * bytes_per_s

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket
