"""The unified scheduler: continuous batching on two counters with a token budget (T 4.4, 4.5.1).

Four doors: `add`, `control`, `schedule`, `update`. Nothing else changes its state; it reads no
clock and makes no I/O, so the list of calls is the run. A door returns all that it has decided.

The state has owners, each the only writer of what it owns; they see those above them, never below:

    rows        every number of the rows, and their order              rows.py
    memory      who gets which blocks; the question "does it fit"      memory.py
    lifecycle   what state a sequence is in, the queue, the events     lifecycle.py
    stores      what is asked of stores                                stores.py
    arrivals    sequences of new requests, and when they are late      arrivals.py
    pins        prefixes that are kept                                 pins.py
    drafts      what sequences may try                                 drafts.py
    planner     the plans in flight, and how the next one is made      planning.py

`depth` plans may be in flight; no other code knows how many.
"""

import enum
from collections.abc import Callable
from typing import Any

from quire.base.config import SchedulerConfig
from quire.base.errors import RequestError
from quire.base.kv_orders import Answer
from quire.base.kv_transfer import EVICTED
from quire.base.live import LiveState
from quire.base.messages import (
    Abort,
    Append,
    Cancel,
    Control,
    Drafted,
    Fork,
    GrammarReady,
    HeldRequest,
    Hold,
    KeepCached,
    MeasuredRates,
    PinnedPrefix,
    PutBack,
    Request,
    ResetPrefixCache,
    Rewind,
    Unpin,
)
from quire.base.plan import Plan, StepResult
from quire.base.step_outputs import CANCELLED, Finish
from quire.base.validation import check_open, check_pin
from quire.kv.digest import root_digest
from quire.scheduler.admission import Admission
from quire.scheduler.arrivals import Arrivals
from quire.scheduler.block_naming import Digester, NewNames
from quire.scheduler.branching import Branching
from quire.scheduler.decisions import (
    Decisions,
    PinsView,
    RequestView,
    SchedulerView,
    TierView,
)
from quire.scheduler.drafts import Drafts
from quire.scheduler.fifo import Fifo
from quire.scheduler.invariants import check_lives, check_memory, check_rows
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.live import live_state
from quire.scheduler.memory import Memory
from quire.scheduler.outputs_builder import OutputsBuilder
from quire.scheduler.pins import Pins
from quire.scheduler.planning import Planner
from quire.scheduler.policy import MakePolicy
from quire.scheduler.preemption import Preemption
from quire.scheduler.progress import SchedulerProgress
from quire.scheduler.renaming import rename
from quire.scheduler.rows import Rows
from quire.scheduler.sequence import NEVER, Sequence, State
from quire.scheduler.step_results import StepResults
from quire.scheduler.stores import Stores

Collector = Callable[[float], Any | None]  # at a time: what has changed, if anything


class Topic(enum.Enum):
    """What subscribers may hear of beside what every call decides."""

    HELD = "held"  # HeldChanges
    INDEX = "index"  # IndexDelta


class Scheduler:
    """Decides who computes how many tokens in each step, and which blocks they use.

    max_num_seqs rows, max_num_batched_tokens per plan, sequences up to max_model_len tokens.
    memory: may be another manager's (memory.py); num_stores: that are asked for blocks. num_stages:
    of the model, each of which carries out all plans. kept: what stores get (base/kv_transfer.py).
    """

    def __init__(
        self,
        memory: Memory,
        config: SchedulerConfig,
        max_model_len: int,
        make_policy: MakePolicy = Fifo,
        num_stores: int = 0,
        num_stages: int = 1,
        kept: str = EVICTED,
    ) -> None:
        assert config.max_num_seqs and config.max_num_batched_tokens, "derive these two first"
        most_prefill = config.long_prefill_token_threshold
        self.depth = config.pipeline_depth or 1
        self.token_budget = config.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.memory = memory
        self.rows = rows = Rows(config.max_num_seqs, max_model_len, most_prefill, num_stages)
        self.progress = progress = SchedulerProgress(rows, memory)
        self.lifecycle = lifecycle = Lifecycle(rows, memory, make_policy, progress)
        self.stores = Stores(memory, lifecycle, num_stores, kept) if num_stores else None
        self.arrivals = Arrivals(rows, memory, lifecycle, self.stores, max_model_len)
        self.pins = Pins(memory, lifecycle, self.arrivals)
        branching = Branching(rows, memory, lifecycle)
        mode, budget = config.preemption_mode, self.token_budget
        self.preemption = preemption = Preemption(rows, memory, lifecycle, mode)
        self.admission = Admission(rows, memory, lifecycle, preemption, budget, most_prefill)
        self.drafts = drafts = Drafts(rows, memory, lifecycle)
        self.planner = Planner(
            rows, memory, lifecycle, progress, branching, preemption, self.admission, drafts
        )
        self._results = StepResults(rows, memory, lifecycle, branching, self.pins, self.stores)
        self._is_ending = False  # what is cached is to be kept in stores
        self._collectors: list[Collector] = []  # of what subscribers hear of

    @property
    def num_running(self) -> int:
        return self.rows.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.lifecycle.queue)

    @property
    def num_free_rows(self) -> int:
        return self.rows.num_free

    @property
    def may_repeat_steps(self) -> bool:
        """Whether a step that failed can be run again: keys and values are written where they were,
        states over those that were read, and stages before the one that failed have gone on. If
        not, `update` takes its result as it is."""
        return not self.memory.kv.has_states and not self.has_stages

    @property
    def has_stages(self) -> bool:
        """Whether some of what carries out plans may have gone on when a step fails: then nothing
        counts of the plans behind it."""
        return self.rows.num_stages > 1

    @property
    def has_work(self) -> bool:
        lifecycle = self.lifecycle
        has_requests = bool(lifecycle.sequences or lifecycle.dropped)
        return has_requests or bool(self.planner.in_flight) or self.memory.has_offers

    # ---- the four doors ----------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Decisions:
        """Queue a request, or refuse it if this engine can never serve it."""
        self._drop_late(now)
        try:
            sequence = self._accept(request, now)
        except RequestError as error:
            return self._decisions(now, refusal=error)
        if request.fork is not None:
            self._branch(sequence)
        self.arrivals.enter(sequence, now)
        if request.pin_s is not None:
            self.pins.begin(sequence, now)
        return self._decisions(now)

    def control(self, message: Control, now: float) -> Decisions:
        """Carry out a control message. Unknown request ids have ended by themselves."""
        if isinstance(message, ResetPrefixCache):
            self._reset_cache(message.epoch, now)
        elif isinstance(message, Append):
            self.arrivals.append(message, now)
        elif isinstance(message, GrammarReady):
            self.arrivals.take_grammar(message, now)
        elif isinstance(message, MeasuredRates):
            self.memory.rates = message
        elif isinstance(message, Drafted):
            self.drafts.take(message)
        elif isinstance(message, Answer):
            if self.stores is not None:
                self.stores.take(message)
        elif isinstance(message, KeepCached):
            self._is_ending = True
        elif isinstance(message, Unpin):
            computing = self.pins.remove(message.request_id, message.tenant)
            if computing is not None:  # somebody waits for it
                self.lifecycle.drop(computing, Finish("abort"), now)
        elif isinstance(message, Hold):
            self.memory.held.hold(message, self.lifecycle.sequences, now)
        elif isinstance(message, PutBack):
            self.memory.held.put_back(message, now)
        elif isinstance(message, Rewind):
            self.memory.held.rewind(message)
        elif isinstance(message, Cancel):
            for member in self._open_members(message.request_id):
                self.lifecycle.drop(member, CANCELLED, now)
        elif isinstance(message, Abort):
            self._end(message, now)
        return self._decisions(now)

    def schedule(self, now: float) -> Decisions:
        """Make the next plan, if there is something to plan before a result comes in."""
        in_flight = self.planner.in_flight
        if len(in_flight) >= self.depth:
            return self._decisions(now)
        lifecycle = self.lifecycle
        for sequence, finish in self.arrivals.time_limits.take_late(lifecycle.sequences, now):
            for member in sequence.members:
                if member.state is not State.ENDED:
                    lifecycle.drop(member, finish, now)
        self._tell_ended()
        self._drop_late(now)
        if self.stores is not None and self.memory.offers is not None:
            self.memory.offers.allow(self.stores.room)
        plan = self._flush() if self._is_ending else self.planner.plan(now)
        if plan is None and not in_flight:
            plan = self._offload()
        if plan is not None:
            return self._decisions(now, plan=plan, sampling=in_flight[-1].sequences)
        return self._decisions(now, None if in_flight else OutputsBuilder())

    def update(self, result: StepResult, now: float) -> Decisions:
        """Take the result of the oldest plan in flight: pending tokens become known."""
        is_repeatable = result.error is None or not self.may_repeat_steps
        assert is_repeatable, "a step that failed is to be repeated row by row first"
        lifecycle, in_flight = self.lifecycle, self.planner.in_flight
        step = in_flight.popleft()
        is_flush = len(step.plan.rows) == 0
        outputs = OutputsBuilder()
        if not is_flush or result.lost_swaps:
            outputs = self._results.take(step, in_flight, result, now)
        for sequence in lifecycle.take_admitted():
            outputs.update_of(sequence).prefix = sequence.report
        for sequence in self.pins.settle(in_flight, now):
            outputs.finish(sequence, Finish("pinned"))
            lifecycle.end(sequence, "pinned", now)
        # After it: a step with an error may have copied nothing out.
        settled = self.memory.settle(result.step_id)
        if self.stores is not None:
            self.stores.keep(settled, int(NEVER) if is_flush else None)
        return self._decisions(
            now, outputs, left_out=tuple(frozenset(s.left_out) for s in in_flight)
        )

    # ---- what others see ---------------------------------------------------------------------

    def has(self, request_id: str) -> bool:
        """Tell whether a request has not ended."""
        return request_id in self.lifecycle.sequences

    def prefixes(self, now: float, tenant: str | None = None) -> list[PinnedPrefix]:
        """List what is pinned, oldest first; tenant: whose, None is everybody's."""
        return self.memory.pinned.listing(now, tenant)

    def held(
        self, now: float, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[HeldRequest]:
        """List what is held, oldest first; or tell of one sequence, held or not ended, with its
        tokens. tenant: whose, None is everybody's."""
        held = self.memory.held
        if request_id is None:
            return held.listing(tenant, now)
        sequences, names = self.lifecycle.sequences, (request_id, f"{request_id}-0")
        asked = (held.ask(Fork(name, index, 0), sequences, tenant, now) for name in names)
        return [found for found in asked if found is not None][:1]

    def requests(self) -> tuple[RequestView, ...]:
        """List the requests that have not ended, oldest first."""
        return tuple(_view_of(sequence) for sequence in self.lifecycle.sequences.values())

    def view(self) -> SchedulerView:
        """Return the state as it is now. No open request is looked at: the core waits meanwhile."""
        kv, pinned, stores = self.memory.kv, self.memory.pinned, self.stores
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
            held=self.memory.held.view(),
            tier=None if kv.tier is None else TierView(kv.tier.num_offloaded, kv.tier.num_loaded),
            stores=None if stores is None else stores.view(),
            plans=tuple(step.plan for step in self.planner.in_flight),
        )

    def live_state(self) -> LiveState:
        """Return whose each block is, who runs, and who waits why: for those who watch."""
        return live_state(self.rows, self.memory, self.lifecycle, self.admission)

    def subscribe(self, topic: Topic, keeps_tokens: bool = False) -> None:
        """Put what changes in a topic into the notes of all decisions from now on. keeps_tokens: of
        the index: with the tokens of blocks."""
        memory = self.memory
        if topic is Topic.HELD:
            memory.held.changes = {}
            self._collectors.append(memory.held.take_changes)
        else:
            self._collectors.append(memory.watch_index(keeps_tokens).take)

    def note_names(self, into: list[NewNames] | None) -> None:
        """Append to this list every name that a block is given from now on, also by a door that
        raises; None: to none."""
        self.memory.names.new = into

    def continue_with(self, digester: Digester) -> None:
        """Go on from a snapshot, which lacks what tells no plan from another (snapshot.OMITTED).
        digester: what names blocks."""
        self.memory.continue_with(digester)
        self.lifecycle.events = []
        self._collectors = []

    def check_invariants(self) -> None:
        """Assert that counters, rows and blocks agree."""
        check_memory(self.memory, self.rows, self.lifecycle, self.stores)
        check_rows(self.rows, self.lifecycle, len(self.planner.in_flight))
        check_lives(self.rows, self.lifecycle)

    # ------------------------------------------------------------------------------------------

    def _decisions(
        self, now: float, outputs: OutputsBuilder | None = None, **decided: Any
    ) -> Decisions:
        """Gather what this call has decided. outputs: if clients are told of what was dropped."""
        self._tell_ended()
        lifecycle, stores = self.lifecycle, self.stores
        if outputs is not None:
            for sequence, finish in lifecycle.take_dropped():
                outputs.finish(sequence, finish)
            decided["outputs"] = outputs.build()
        late_s = self.arrivals.time_limits.next_s(lifecycle.sequences)
        times = [t for t in (late_s, self.pins.next_s, self.memory.held.next_s) if t is not None]
        return Decisions(
            events=lifecycle.take_events(),
            orders=[] if stores is None else stores.take_orders(),
            notes=[] if not self._collectors else self._notes(now),
            next_s=min(times, default=None),
            **decided,
        )

    def _notes(self, now: float) -> list[Any]:
        return [note for collect in self._collectors if (note := collect(now)) is not None]

    def _tell_ended(self) -> None:
        """Let pins and stores forget who has ended."""
        for sequence in self.lifecycle.take_ended():
            self.pins.drop(sequence)
            self.memory.held.drop(sequence)
            if self.stores is not None:
                self.stores.drop(sequence)

    def _accept(self, request: Request, now: float) -> Sequence:
        """Make a request's sequence. Raises RequestError if it can never be served, and EngineBusy
        if only not now."""
        if request.request_id in self.lifecycle.sequences or self.pins.has(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        if request.request_id in self.memory.held.by_id:
            raise RequestError(f"a request {request.request_id!r} is held; choose another id.")
        if request.keep_s:
            self.memory.held.check(request, self.lifecycle.sequences)
        num_prompt = len(request.prompt_token_ids)
        if not 1 <= num_prompt < self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; between 1 and max_model_len - 1 ="
                f" {self.max_model_len - 1} are possible. Shorten it or raise max_model_len."
            )
        num, most_output = request.params.num_samples, request.params.max_tokens
        if num > self.rows.table.num_rows:
            raise RequestError(
                f"{num} sequences at once are more than max_num_seqs={self.rows.table.num_rows};"
                " ask for fewer (n, best_of) or raise max_num_seqs."
            )
        sequence = self.arrivals.new_sequence(request, now)
        if request.pin_s is not None:
            check_pin(request)
            self.pins.check(request)
        elif request.is_open:
            check_open(request.params)
        elif not self.arrivals.fits_at_all(sequence, sequence.limit, num):
            raise RequestError(
                f"{num_prompt} prompt tokens and {num} x {most_output or self.max_model_len} output"
                " tokens need more KV blocks than the pool has beside what is pinned. Lower"
                " max_tokens or enlarge kv_cache_memory_bytes."
            )
        return sequence

    def _end(self, message: Abort, now: float) -> None:
        """End a request, or one of its sequences; index -1 is all."""
        for member in self._open_members(message.request_id):
            if message.index in (-1, member.index):
                self.lifecycle.end(member, message.finish_reason, now)

    def _branch(self, sequence: Sequence) -> None:
        """Take hold of what a fork begins with. Who runs on it looks who shares before it
        writes."""
        running = self.memory.held.branch(sequence, self.lifecycle.sequences)
        if running is not None:
            self.rows.share(running.row)

    def _drop_late(self, now: float) -> None:
        self.pins.drop_late(now)
        self.memory.held.drop_late(now)

    def _open_members(self, request_id: str) -> list[Sequence]:
        """List the sequences of a request that have not ended; none of one that is not known."""
        sequence = self.lifecycle.sequences.get(request_id)
        members = [] if sequence is None else sequence.members
        return [member for member in members if member.state is not State.ENDED]

    def _reset_cache(self, epoch: str, now: float) -> None:
        """Forget all names, and let those to come be others (renaming.py)."""
        self.memory.reset(root_digest(self.memory.names.fingerprint, epoch))
        self.pins.give_rows_back(now)
        for sequence in self.lifecycle.sequences.values():
            rename(sequence, self.memory.names, epoch)
        if self.stores is not None:
            self.stores.start_over()
        self.pins.start_over(now)

    def _offload(self) -> Plan | None:
        """Copy out what stores wait for, if no other plan does. What cannot be copied though
        nothing is under way is given up."""
        offers = self.memory.offers
        if offers is None or self.stores is None or not self.memory.has_offers:
            return None
        plan = self.planner.offload()
        if plan is None and self.stores.num_keeping == 0:
            offers.drop_waiting()
        return plan

    def _flush(self) -> Plan | None:
        """Copy out what is cached, unless plans are in flight or no other engine could use it."""
        is_kept = self.stores is None or (self.stores.keeps and not self.stores.is_private)
        return self.planner.flush() if is_kept and not self.planner.in_flight else None


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
