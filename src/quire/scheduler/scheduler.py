"""Scheduler with all features: the core's four doors, and questions about its state.

    prefix index        hits by name, on the device and in host memory    prefix_index.py
    pinned prefixes     prompts whose blocks stay until they are unpinned pins.py, pinned.py
    retained requests   ended requests to continue or fork                held.py
    media inputs        images in prompts, and their encoder outputs      media_inputs.py
    partial blocks      last blocks of ended sequences that are not full  partial_blocks.py
    stores              blocks outside of this process                    stores.py, offers.py
    miss reports        reasons for prefix misses                         miss_report.py
    steering            changes of priority, and pauses                   steering.py
    adapters            requests that wait for their adapters             adapter_waits.py

A new feature attaches in the same way (extension.py). The core does not change.
"""

import enum

from quire.base.live import LiveState
from quire.base.messages import Fork, PinnedPrefix, RetainedRequest
from quire.base.settings.config import SchedulerConfig
from quire.base.settings.kv_transfer import EVICTED
from quire.scheduler.adapter_waits import AdapterWaits
from quire.scheduler.branching.branching import Branching
from quire.scheduler.branching.drafts import Drafts
from quire.scheduler.core.extension import CacheListener, of_kind
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester, NewNames
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.core.scheduler_core import SchedulerCore
from quire.scheduler.core.sequence import Sequence, State
from quire.scheduler.invariants import check_lives, check_memory, check_rows
from quire.scheduler.live import live_state
from quire.scheduler.media.media_inputs import MediaInputs, MediaRefusal
from quire.scheduler.policy.extensions import extension_classes
from quire.scheduler.reuse.held import Holds
from quire.scheduler.reuse.index_changes import IndexWatch
from quire.scheduler.reuse.miss_report import MissReports
from quire.scheduler.reuse.partial_blocks import PartialBlocks
from quire.scheduler.reuse.pinned import PinnedPrefixes
from quire.scheduler.reuse.pins import Pins
from quire.scheduler.reuse.prefix_index import PrefixIndex
from quire.scheduler.reuse.stores import Stores
from quire.scheduler.steering import Steering
from quire.scheduler.views import PinsView, RequestView, SchedulerView, TierView


class Topic(enum.Enum):
    """Topics of changes that a subscriber can request, in addition to the decisions of each
    call."""

    HELD = "held"  # RetainedChanges
    INDEX = "index"  # IndexDelta


class Scheduler(SchedulerCore):
    """See SchedulerCore. num_stores: number of stores that are looked up. kept: the blocks that
    stores receive (base/settings/kv_transfer.py). takes_media: whether the model takes images or
    videos."""

    drafts: Drafts
    media: MediaInputs | None = None  # None in a snapshot of an earlier version

    def __init__(
        self,
        memory: Memory,
        config: SchedulerConfig,
        max_model_len: int,
        make_policy: MakePolicy = Fifo,
        num_stores: int = 0,
        num_stages: int = 1,
        kept: str = EVICTED,
        takes_media: bool = False,
    ) -> None:
        super().__init__(memory, config, max_model_len, Branching, Drafts, make_policy, num_stages)
        lifecycle, planner, kv = self.lifecycle, self.planner, memory.kv
        self.retained = Holds(memory, self.rows, lifecycle.sequences)
        self.pinned = PinnedPrefixes(memory)
        self.pins = Pins(memory, lifecycle, self.arrivals, self.pinned)
        self.misses = MissReports(kv, memory.names, lifecycle.report_prefix)
        self.stores: Stores | None = None
        self.attach(self.retained, PrefixIndex(kv, memory.names, memory))
        partial = None
        if config.reuse_partial_blocks and memory.names_partial_blocks:
            partial = PartialBlocks(memory)
            self.attach(partial)
        if num_stores:
            self.stores = Stores(memory, lifecycle, planner, self.orders, num_stores, kept, partial)
            offers = self.stores.offers
            self.attach(self.stores, *(() if offers is None else (offers,)))
        if takes_media:
            self.media = MediaInputs(config)
        steering = Steering(lifecycle)
        self.attach(self.pinned, self.pins, self.misses, self.media or MediaRefusal(), steering)
        self.attach(AdapterWaits(lifecycle))
        self.attach(*(kind(kv) for kind in extension_classes(config.scheduler_extensions)))

    # ---- questions ---------------------------------------------------------------------------

    def has(self, request_id: str) -> bool:
        """Return whether a request is unfinished."""
        return request_id in self.lifecycle.sequences

    def prefixes(self, now: float, tenant: str | None = None) -> list[PinnedPrefix]:
        """Return the pinned prefixes of a tenant, oldest first; of all tenants if None."""
        return self.pinned.listing(now, tenant)

    def held(
        self, now: float, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        """Return the retained sequences of a tenant, oldest first; of all tenants if None. With
        request_id, return only one sequence with its tokens, retained or unfinished."""
        if request_id is None:
            return self.retained.listing(tenant, now)
        names = (request_id, f"{request_id}-0")
        descriptions = (self.retained.describe(Fork(name, index, 0), tenant, now) for name in names)
        return [found for found in descriptions if found is not None][:1]

    def requests(self) -> tuple[RequestView, ...]:
        """Return the unfinished requests, oldest first."""
        return tuple(_view_of(sequence) for sequence in self.lifecycle.sequences.values())

    def view(self) -> SchedulerView:
        """Return the current state as counters. Open requests are not visited, since the core waits
        meanwhile."""
        kv, pinned, stores = self.memory.kv, self.pinned, self.stores
        return SchedulerView(
            num_rows=self.rows.table.num_rows,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            usage=kv.usage,
            pins=PinsView(
                len(pinned.by_id), pinned.num_blocks, pinned.num_hits, pinned.num_hit_tokens
            ),
            held=self.retained.view(),
            tier=None if kv.tier is None else TierView(kv.tier.num_offloaded, kv.tier.num_loaded),
            stores=None if stores is None else stores.view(),
            media=None if self.media is None else self.media.view(),
            plans=tuple(step.plan for step in self.planner.in_flight),
        )

    def live_state(self) -> LiveState:
        """Return the owner of each block, the running rows, and the waiting sequences with their
        reasons, for observers."""
        return live_state(self, self.retained, self.pinned)

    # ---- subscribers, snapshots and tests ----------------------------------------------------

    def subscribe(self, topic: Topic, keeps_tokens: bool = False) -> None:
        """Add the changes of a topic to the notes of all decisions from now on. keeps_tokens: for
        the index, include the tokens of blocks."""
        if topic is Topic.HELD:
            self.retained.changes = {}
            self._collectors.append(self.retained.take_changes)
            return
        watch = IndexWatch(self.memory.kv, keeps_tokens)
        self.memory.attach(watch)
        self._collectors.append(watch.take)

    def note_names(self, into: list[NewNames] | None) -> None:
        """Append every new block name to this list from now on, even from a door that raises. None
        turns it off."""
        self.memory.names.new = into

    def continue_with(self, digester: Digester) -> None:
        """Restore the parts that a snapshot omits, which do not influence plans (snapshot.OMITTED).
        digester: computes the names of blocks."""
        memory = self.memory
        memory.listeners = of_kind(self.features, CacheListener)
        memory.continue_with(digester)
        self.lifecycle.events = []
        self._collectors = []
        self.misses.start(self.lifecycle.report_prefix)
        self.arrivals.connect()
        self._handlers = self._own_handlers()

    def check_invariants(self) -> None:
        """Assert that counters, rows and blocks are consistent."""
        assert not self.memory.spent, "what a plan has begun with is still held"
        tables = self.retained.tables()
        assert all(table.is_evictable for table in tables), "room that it makes is not counted"
        tables += self.pinned.tables()
        stores = self.stores
        on_order = [] if stores is None else [stores.held_blocks]
        check_memory(self.memory, self.rows, self.lifecycle, tables, on_order)
        check_rows(self.rows, self.lifecycle, len(self.planner.in_flight))
        check_lives(self.rows, self.lifecycle)
        if self.media is not None:
            self.media.check()


def _view_of(sequence: Sequence) -> RequestView:
    running = [member for member in sequence.members if member.row >= 0]
    return RequestView(
        request=sequence.request,
        num_prompt_tokens=sequence.num_prompt_tokens,
        arrival_s=sequence.arrival_s,
        num_cached_tokens=sequence.num_cached_tokens,
        rows=tuple(member.row for member in running),
        filling=tuple(m.row for m in running if m.num_known_tokens == m.num_prompt_tokens),
        is_waiting=any(m.state in (State.WAITING, State.SWAPPED) for m in sequence.members),
    )
