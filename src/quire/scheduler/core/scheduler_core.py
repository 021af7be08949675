"""The unified scheduler: continuous batching on two counters with a token budget (T 4.4, 4.5.1).

Only the four doors `add`, `control`, `schedule` and `update` change its state, and each returns all
that it decides. The scheduler reads no clock and does no I/O, so the list of calls is the run.

Each owner is the only writer of its state, and uses only the owners above it:

    rows        all numbers of the rows, and the running order     rows.py
    memory      blocks, and whether a need fits                    memory.py
    lifecycle   states of sequences, the queue, the events         lifecycle.py
    arrivals    new requests, and their deadlines                  arrivals.py
    drafts      draft tokens                                       branching/drafts.py
    planner     the plans in flight                                planning.py

Features attach to it (extension.py); it names none of them.
"""

from collections.abc import Callable
from typing import Any

from quire.base.errors import RequestError
from quire.base.kv_orders import Order
from quire.base.messages import (
    Abort,
    Append,
    Cancel,
    Control,
    Drafted,
    Freeze,
    GrammarReady,
    MeasuredRates,
    Request,
    ResetPrefixCache,
)
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.kv.digest import root_digest
from quire.scheduler.core.admission import Admission
from quire.scheduler.core.arrivals import Arrivals
from quire.scheduler.core.extension import (
    Collector,
    DraftTokens,
    Extension,
    Forking,
    Handler,
    StepEnd,
    StepExtension,
)
from quire.scheduler.core.failures import Failures
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import rename
from quire.scheduler.core.planning import Planner
from quire.scheduler.core.preemption import Preemption
from quire.scheduler.core.queue import Fifo, MakePolicy, SchedulerProgress
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.step_results import StepResults
from quire.scheduler.decisions import Decisions, OutputsBuilder


class SchedulerCore:
    """Scheduler core: decides which sequences compute how many tokens in each step, in which
    blocks.

    memory: block memory; a subclass may follow other rules. num_stages: pipeline stages of the
    model; each of them executes every plan. depth: maximum number of plans in flight.
    """

    _is_frozen = False  # compute nothing; older snapshots lack it

    def __init__(
        self,
        memory: Memory,
        config: SchedulerConfig,
        max_model_len: int,
        make_forking: Callable[[Rows, Memory, Lifecycle], Forking],
        make_drafts: Callable[[Rows, Memory, Lifecycle], DraftTokens],
        make_policy: MakePolicy = Fifo,
        num_stages: int = 1,
    ) -> None:
        assert config.max_num_seqs and config.max_num_batched_tokens, "derive these two first"
        max_prefill = config.long_prefill_token_threshold
        self.depth = config.pipeline_depth or 1
        self.token_budget = config.max_num_batched_tokens
        self.max_model_len = max_model_len
        self.memory = memory
        self.features: list[object] = []  # in the order of calls
        self.extensions: list[Extension] = []
        self.step_extensions: list[StepExtension] = []
        self.orders: list[Order] = []  # for stores, since the last call
        self.rows = rows = Rows(config.max_num_seqs, max_model_len, max_prefill, num_stages)
        self.progress = progress = SchedulerProgress(rows, memory)
        self.lifecycle = lifecycle = Lifecycle(rows, memory, make_policy, progress)
        forking = make_forking(rows, memory, lifecycle)
        self.arrivals = Arrivals(rows, memory, lifecycle, forking, self.features, max_model_len)
        mode, budget = config.preemption_mode, self.token_budget
        self.preemption = preemption = Preemption(rows, memory, lifecycle, mode)
        self.admission = Admission(rows, memory, lifecycle, preemption, budget, max_prefill)
        self.drafts = drafts = make_drafts(rows, memory, lifecycle)
        self.planner = Planner(
            rows, memory, lifecycle, progress, forking, preemption, self.admission, drafts
        )
        failures = Failures(rows, memory, lifecycle, self.extensions)
        self._results = StepResults(rows, memory, lifecycle, forking, drafts, failures)
        self._collectors: list[Collector] = []  # changes for subscribers
        self.attach()

    def attach(self, *features: object) -> None:
        """Attach features (extension.py). Features are called in the order of attaching."""
        for feature in features:
            self.features.append(feature)
            self.memory.attach(feature)
            if isinstance(feature, Extension):
                self.extensions.append(feature)
            if isinstance(feature, StepExtension):
                self.step_extensions.append(feature)
        self.arrivals.connect()
        self._handlers = self._own_handlers()

    def _own_handlers(self) -> dict[type, list[Handler]]:
        """Return the handlers of control messages by type, the core's own handlers first."""
        found: dict[type, list[Handler]] = {
            ResetPrefixCache: [lambda message, now: self._reset_cache(message.epoch, now)],
            Freeze: [lambda message, now: self._freeze(message.is_frozen)],
            Append: [self.arrivals.append],
            GrammarReady: [self.arrivals.take_ready],
            MeasuredRates: [lambda message, now: self._measure(message)],
            Drafted: [lambda message, now: self.drafts.take(message)],
            Cancel: [self.arrivals.cancel],
            Abort: [self.arrivals.abort],
        }
        for extension in self.extensions:
            for kind, handler in extension.handlers().items():
                found.setdefault(kind, []).append(handler)
        return found

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
        """Whether a failed step can be run again. It cannot if states are overwritten in place or
        earlier stages have continued; `update` then takes the failed result."""
        return not self.memory.kv.has_states and not self.has_stages

    @property
    def has_stages(self) -> bool:
        """Whether the model has several stages. Other stages may have continued when a step fails,
        so all later plans in flight are void."""
        return self.rows.num_stages > 1

    @property
    def has_work(self) -> bool:
        if self.lifecycle.sequences or self.lifecycle.dropped or self.planner.in_flight:
            return True
        return any(extension.has_work for extension in self.step_extensions)

    # ---- the four doors ----------------------------------------------------------------------

    def add(self, request: Request, now: float) -> Decisions:
        """Queue a request, or refuse it if this engine can never serve it, or is too busy now."""
        self._expire(now)
        try:
            self.arrivals.add(request, now)
        except RequestError as error:
            return self._decisions(now, refusal=error)
        return self._decisions(now)

    def control(self, message: Control, now: float) -> Decisions:
        """Carry out a control message. A message for an ended request is ignored."""
        for handler in self._handlers.get(type(message), ()):
            handler(message, now)
        return self._decisions(now)

    def schedule(self, now: float) -> Decisions:
        """Make the next plan, if a sequence can be planned before another result is in."""
        in_flight = self.planner.in_flight
        if len(in_flight) >= self.depth:
            return self._decisions(now)
        if self.arrivals.time_limits.deadlines:
            self.arrivals.drop_late(now)
        self._notify_watchers()
        self._expire(now)
        plan = None if self._is_frozen else self.planner.plan(now)
        if plan is None and not in_flight:
            plan = self._idle_plan(now)
        if plan is not None:
            return self._decisions(now, plan=plan, sampling=in_flight[-1].sequences)
        return self._decisions(now, None if in_flight else OutputsBuilder())

    def update(self, result: StepResult, now: float) -> Decisions:
        """Take the result of the oldest plan in flight: its pending tokens become known."""
        is_repeatable = result.error is None or not self.may_repeat_steps
        assert is_repeatable, "a step that failed is to be repeated row by row first"
        lifecycle, in_flight = self.lifecycle, self.planner.in_flight
        step = in_flight.popleft()
        is_flush = len(step.plan.rows) == 0
        if is_flush and not result.lost_swaps:
            outputs = OutputsBuilder()
        else:
            outputs = self._results.take(step, in_flight, result, now)
        for sequence in lifecycle.take_admitted():
            outputs.update_of(sequence).prefix = sequence.report
        # Settle after `take`: a failed step may not have copied its blocks.
        settled = self.memory.settle(result.step_id)
        if following := [each for each in self.step_extensions if each.follows_steps]:
            end = StepEnd(result, is_flush, in_flight, outputs, settled)
            for extension in following:
                extension.end_step(end, now)
        omitted = tuple(frozenset(step.omitted) for step in in_flight)
        return self._decisions(now, outputs, omitted=omitted)

    # ------------------------------------------------------------------------------------------

    def _decisions(
        self, now: float, outputs: OutputsBuilder | None = None, **decided: Any
    ) -> Decisions:
        """Return the decisions of this call. outputs: outputs so far; dropped requests are added to
        them."""
        lifecycle = self.lifecycle
        if lifecycle.ended:
            self._notify_watchers()
        self.rows.update_order()  # questions between two calls change nothing
        if outputs is not None:
            for sequence, finish in lifecycle.take_dropped():
                outputs.finish(sequence, finish)
            decided["outputs"] = outputs.build()
        if self.orders:
            decided["orders"], self.orders[:] = self.orders.copy(), ()
        if self._collectors:
            notes = [collect(now) for collect in self._collectors]
            decided["notes"] = [note for note in notes if note is not None]
        return Decisions(events=lifecycle.take_events(), next_s=self._next_s(), **decided)

    def _next_s(self) -> float | None:
        """Return the earliest due time of a deadline or an extension, or None."""
        limits = self.arrivals.time_limits
        next_s = limits.next_s(self.lifecycle.sequences) if limits.deadlines else None
        for extension in self.step_extensions:
            due_s = extension.next_s
            if due_s is not None and (next_s is None or due_s < next_s):
                next_s = due_s
        return next_s

    def _notify_watchers(self) -> None:
        """Notify the watchers of ended sequences, so that they forget these."""
        for sequence in self.lifecycle.take_ended():
            for watcher in sequence.watchers:
                watcher.forget(sequence)

    def _measure(self, rates: MeasuredRates) -> None:
        self.memory.rates = rates

    def _expire(self, now: float) -> None:
        for extension in self.step_extensions:
            if extension.next_s is not None and extension.next_s <= now:
                extension.expire(now)

    def _reset_cache(self, epoch: str, now: float) -> None:
        """Remove all names. New names begin with another root (names.py)."""
        self.memory.reset(root_digest(self.memory.names.fingerprint, epoch), now)
        for sequence in self.lifecycle.sequences.values():
            rename(sequence, self.memory.names, epoch)

    def _freeze(self, is_frozen: bool) -> None:
        self._is_frozen = is_frozen

    def _idle_plan(self, now: float) -> Plan | None:
        """Return the first extension's plan that only moves blocks, or None."""
        for extension in self.step_extensions:
            if (plan := extension.idle_plan(now)) is not None:
                return plan
        return None
