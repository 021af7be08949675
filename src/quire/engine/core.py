"""The core: scheduler, KV manager and executor in one plain loop.

Requests and control messages come in through `add` and `control`; each `step` plans as far ahead as
the pipeline depth allows, takes the oldest result, and returns what it gave each request. A caller
that has other things to wait for asks `rest_s` how long nothing is to be done, and calls `advance`.
A step that raises is repeated in parts (`engine/bisect.py`): the requests whose rows fail alone end
with an error, all others get what they would have got.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from quire.base.clock import Clock
from quire.base.errors import EngineBusy, EngineError, RequestError
from quire.base.events import Event
from quire.base.kv_orders import KEEP_AT_END_S
from quire.base.masks import MaskPromise
from quire.base.messages import (
    Abort,
    Control,
    Drafted,
    HeldRequest,
    Hold,
    KeepCached,
    MeasuredRates,
    PinnedPrefix,
    Request,
    Unpin,
)
from quire.base.plan import Plan, StepResult
from quire.base.step_outputs import StepOutputs
from quire.base.validation import RequestLimits, check_fork
from quire.engine.bell import Bell
from quire.engine.bisect import (
    bisect_step,
    combine,
    give_all_up,
    give_rows_up,
    leave_out,
    with_leftover,
    without_copies,
)
from quire.engine.connectors.connections import MOST_WAIT_S, OpenStores
from quire.engine.connectors.named_peers import NamedPeers
from quire.engine.drafting import Guesses
from quire.engine.executor import Executor
from quire.engine.grammars import Grammars
from quire.engine.held_files import HeldFiles
from quire.engine.pacing import Pacing
from quire.engine.preparation import Preparation, nothing_to_load
from quire.engine.record import Doors, WatchingDoors
from quire.engine.step_budget import StepBudget
from quire.engine.submitted import NOBODY, Sampling, Submitted
from quire.scheduler.decisions import Decisions, RequestView, SchedulerView
from quire.scheduler.held import HeldChanges
from quire.scheduler.scheduler import Scheduler, Topic

logger = logging.getLogger("quire")

PREFILL_TOKENS = 32  # a step of fewer says little of how fast a prompt is computed
RATE_CHANGE = 0.2
SETTLE_S = 2.0

Subscriber = Callable[[Event], None]


class EngineCore:
    """One model on one device, and everybody who waits for it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        limits: RequestLimits,
        step_budget: StepBudget | None = None,
    ) -> None:
        """Connect the parts. step_budget: says how many tokens a step has time for; None: as many
        as are configured."""
        self.scheduler = scheduler
        self.doors: Doors = scheduler
        self.executor = executor
        self.limits = limits
        self._clock = clock
        self._watching: list[WatchingDoors] = []
        self._subscribers: list[Subscriber] = []
        self._submitted: deque[Submitted] = deque()  # the plans in flight
        self._pacing = Pacing(scheduler.rows.num_stages)
        self._has_nothing_to_plan = False  # before something comes in
        self._carried_over: Plan | None = None  # of a plan that was not carried out: for the next
        self._death: str | None = None
        self._stores: OpenStores | None = None
        self._peers = NamedPeers(())
        self._held_files: HeldFiles | None = None
        self._grammars: Grammars | None = None
        self._preparation = nothing_to_load()
        self._drafting: Guesses | None = None
        self.max_num_queued: int | None = None  # requests that may wait
        self._num_left_waiting = 0  # by the last plan
        self._events: list[Event] = []  # that subscribers have not heard of
        self._dropped = StepOutputs()  # what a door has told beside a result
        self._due_s: float | None = None  # when something becomes due by itself
        self._step_budget = step_budget
        self._rates = MeasuredRates(
            copy_bytes_per_s=executor.copy_bytes_per_s(),
            step_tokens=0 if step_budget is None else step_budget.num_tokens,
        )
        self.control(self._rates)
        self.bell = Bell()
        executor.start(self.bell.ring)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._dropped)

    def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        """List what is pinned, oldest first; tenant: whose, None is everybody's."""
        return self.scheduler.prefixes(self._clock.now(), tenant)

    def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[HeldRequest]:
        """List what is held, as `Scheduler.held` does."""
        return self.scheduler.held(self._clock.now(), request_id, index, tenant)

    def has(self, request_id: str) -> bool:
        """Tell whether a request has not ended."""
        return self.scheduler.has(request_id)

    def view(self) -> SchedulerView:
        """Return the scheduler's state as it is now."""
        return self.scheduler.view()

    def requests(self) -> tuple[RequestView, ...]:
        """List the requests that have not ended."""
        return self.scheduler.requests()

    @property
    def num_in_flight(self) -> int:
        """Plans whose results were not taken yet."""
        return len(self._submitted)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hear of every event from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Hear of nothing any more."""
        self._subscribers = [each for each in self._subscribers if each is not subscriber]

    def connect(self, stores: OpenStores, names: Sequence[str] = ()) -> None:
        """Let these carry out what the scheduler orders of its stores, whose settings these are."""
        self._stores, self._peers = stores, NamedPeers(names)

    def keep_held(self, files: HeldFiles) -> None:
        """Hold again what these files tell, and let them follow what is held from now on."""
        for message in files.load():
            self.control(message)
        self.scheduler.subscribe(Topic.HELD)
        self._held_files = files

    def constrain(self, grammars: Grammars) -> None:
        """Let these say which tokens the requests with a grammar may choose."""
        self._grammars = grammars

    def prepare(self, preparation: Preparation) -> None:
        """Let requests wait for what this loads for them."""
        self._preparation = preparation

    def draft(self, drafting: Guesses) -> None:
        """Let this guess what sequences go on with."""
        self._drafting = drafting

    def watch(self, doors: WatchingDoors) -> None:
        """Let these doors, which pass on to the present ones, see every call from now on."""
        self.doors = doors
        self._watching.append(doors)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for what can never be served, EngineBusy."""
        fork, num_known = request.fork, 0
        if fork is not None:
            num_known = check_fork(request, self.held(fork.request_id, fork.index))
        self.limits.check(request, num_known)
        if request.grammar and self._grammars is None:
            raise RequestError("this engine takes no grammars; leave the form of the answer out.")
        self._check_queue()
        request = self._preparation.mark(self._peers.choose(request))
        decisions = self._pass(self.doors.add(request, self._clock.now()))
        if decisions.refusal is not None:
            raise decisions.refusal
        if request.grammar and self._grammars is not None:
            self._grammars.begin(request)
        self._preparation.begin(request)

    def _check_queue(self) -> None:
        """Raise EngineBusy if too many wait. A burst between two steps may take all free rows
        besides: what came since the last plan does not queue if nobody was left waiting by it."""
        scheduler, most = self.scheduler, self.max_num_queued
        if most is None:
            return
        room = most + (0 if self._num_left_waiting else scheduler.num_free_rows)
        if scheduler.num_waiting >= room:
            raise EngineBusy(
                f"too many requests wait already ({scheduler.num_waiting}, and max_num_queued_reqs"
                f" is {most}); try again in a moment, or start the engine with a larger one."
            )

    def control(self, message: Control) -> None:
        self._pass(self.doors.control(message, self._clock.now()))

    def _pass(self, decisions: Decisions) -> Decisions:
        """Act on what a door has decided: something came in."""
        self._has_nothing_to_plan = False
        self._events += decisions.events
        self._due_s = decisions.next_s
        if self._stores is not None:
            self._stores.submit(decisions.orders)
        if self._grammars is not None:
            self._grammars.hear(decisions.events)
        self._preparation.hear(decisions.events)
        if self._held_files is not None:
            for note in decisions.notes:
                if type(note) is HeldChanges:
                    self._held_files.submit(note.found)
        return decisions

    def step(self) -> StepOutputs:
        """Plan as far ahead as possible, wait for one result and take it. Returns at once if there
        is nothing to do. Raises EngineError, then and ever after, if the core cannot go on."""
        return self._turn(waits=True)

    def settle(self) -> None:
        """Copy out what stores wait for, when nobody asks for anything; but for SETTLE_S at most.
        Raises EngineError."""
        until_s = self._clock.now() + SETTLE_S
        while self.scheduler.has_work and not self.requests() and self._clock.now() < until_s:
            self._turn(waits=True)

    def advance(self) -> StepOutputs:
        """Do what is to be done now: plan if it is time for that, take a result if it is there.
        Raises EngineError as `step` does."""
        return self._turn(waits=False)

    def rest_s(self) -> float | None:
        """Return for how long nothing is to be done; None: until a message comes or the bell rings.
        A request may become late while nothing can be planned, if its prompt is still open."""
        helpers = self._stores, self._grammars, self._preparation
        has_answers = any(helper is not None and helper.has_answers for helper in helpers)
        if self._has_lost_executor or has_answers:
            return 0.0
        if not self.has_work:
            return None if self._due_s is None else max(0.0, self._due_s - self._clock.now())
        if self._is_answered or self._death is not None:
            return 0.0
        if self._has_nothing_to_plan:
            late_s = None if self._submitted else self._next_s
            return None if late_s is None else max(0.0, late_s - self._clock.now())
        if not self._submitted:
            return 0.0
        return None if self._holds_back else max(0.0, self._step_due_s - self._clock.now())

    @property
    def _has_lost_executor(self) -> bool:
        """Tell whether the executor reports, unasked, that it cannot go on."""
        return not self._submitted and self.executor.is_ready()

    @property
    def _step_due_s(self) -> float:
        """When to plan, while plans are in flight."""
        return self._pacing.due_s([step.num_tokens for step in self._submitted])

    @property
    def _next_s(self) -> float | None:
        """When a request becomes late, a pinned prefix is to go, or a store has not answered for
        too long."""
        stores_s = None if self._stores is None else self._stores.next_s
        times = self._due_s, stores_s
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def _is_answered(self) -> bool:
        """Whether the oldest plan in flight has a result."""
        if not self._submitted:
            return False
        return not self._submitted[0].has_run or self.executor.is_ready()

    def _turn(self, waits: bool) -> StepOutputs:
        """Do one turn of the loop. waits: for a result, or a store's answer."""
        if self._death is not None:
            raise EngineError(f"the engine has stopped: {self._death}")
        try:
            if self._has_lost_executor:
                self.executor.next_result()  # raises
            self._take_answers()
            while not self._holds_back and (waits or self._is_due()):
                if self.plan() is None and not self._is_fetching(waits):
                    break
            outputs = StepOutputs()
            if not self._submitted:
                outputs = self.take_dropped()
            elif waits or self._is_answered:
                outputs = self.take()
                is_due = not waits and bool(self._submitted) and not self._holds_back
                if is_due and self._is_due():
                    self.plan()  # before the outputs go out: steps are short
        except EngineError as error:
            self._death = str(error)
            raise
        except Exception as error:
            self._death = f"{type(error).__name__}: {error}"
            raise EngineError(f"the engine cannot go on: {self._death}") from error
        self.publish()
        return outputs

    def _is_fetching(self, waits: bool) -> bool:
        """Wait for a helper, if nothing else is to be done and the caller has the time."""
        is_idle = not self._submitted and not self._dropped and self.has_work
        helpers = self._stores, self._grammars, self._preparation
        if not (waits and is_idle and any(h is not None and h.num_open for h in helpers)):
            return False
        self._wait_for_answer()
        return True

    def _wait_for_answer(self) -> None:
        """Take what helpers answer; if there is nothing, wait a little for it."""
        self.bell.forget()
        if not self._take_answers():
            self.bell.wait(MOST_WAIT_S)
            self._take_answers()

    def _take_answers(self) -> bool:
        """Take what helpers have answered; whether there was something."""
        answers: list[Control] = []
        if self._stores is not None:
            answers += self._stores.take(self._clock.now())
        if self._grammars is not None:
            answers += self._grammars.take()
        answers += self._preparation.take()
        for answer in answers:
            self.control(answer)
        return bool(answers)

    def _is_due(self) -> bool:
        """Tell whether to plan the next step now: nothing runs, or not for much longer."""
        if self._has_nothing_to_plan:
            late_s = self._next_s
            return late_s is not None and late_s <= self._clock.now()
        if not self._submitted or self._is_answered:
            return True
        return self._step_due_s <= self._clock.now()

    def plan(self) -> Plan | None:
        """Plan one step and hand it over, if there is something to plan."""
        self._guess()
        decisions = self._pass(self.doors.schedule(self._clock.now()))
        plan = decisions.plan
        self._num_left_waiting = self.scheduler.num_waiting
        self._has_nothing_to_plan = plan is None
        if decisions.outputs:
            details = [*self._dropped.details, *decisions.outputs.details]
            self._dropped = StepOutputs(details=details)
        if plan is not None:
            if self._drafting is not None:
                self._drafting.planned(plan)
            self._submit(plan, NOBODY if decisions.sampling is None else decisions.sampling)
        return plan

    @property
    def _holds_back(self) -> bool:
        """Whether the next plan waits for a result: as many are in flight as may be, or guesses may
        be tried when none is."""
        if len(self._submitted) >= self.scheduler.depth:
            return True
        return bool(self._submitted) and self._drafting is not None and self._drafting.holds_back

    def _guess(self) -> None:
        """Tell the scheduler what sequences may try."""
        if self._drafting is None or self._drafting.is_idle:
            return
        if len(self._submitted) >= self.scheduler.depth:
            return
        is_ahead = self._drafting.is_ahead
        if self._submitted:
            self._drafting.follow()
            if not is_ahead:
                return
        num_pending = None if is_ahead else 0
        candidates = self.scheduler.drafts.candidates(self._drafting.worth, num_pending)
        if drafts := self._drafting.guess(candidates, self.scheduler.num_running):
            known = drafts if is_ahead else [self.limits.known_part(draft) for draft in drafts]
            self.control(Drafted(known, on_device=is_ahead))

    def _look_ahead(self) -> None:
        """Find out whether the next plan should wait until none is in flight."""
        if self._drafting is None or not self._drafting.looks_ahead:
            return
        if self._drafting.is_idle or not self._submitted:
            return
        num = len(self._submitted)
        found = self.scheduler.drafts.candidates(self._drafting.worth, num)
        self._drafting.look_ahead(found, num, self.scheduler.num_running)

    def take(self) -> StepOutputs:
        """Take the result of the oldest plan in flight."""
        step = self._submitted[0]
        carried_out = step.carried_out
        result = self.executor.next_result() if step.has_run else combine(carried_out, [])
        self._submitted.popleft()
        self._has_nothing_to_plan = False
        self._pacing.end(step.num_tokens, self._clock.now())
        if result.error is not None:
            return self._recover(step, result.error)
        if len(carried_out.rows):
            self._measure(carried_out, result)
        if self._drafting is not None:
            self._drafting.observe(carried_out, result)
        if carried_out is not step.plan:
            result = combine(step.plan, [(carried_out, result)])
        outputs = self._update(result, self._submitted)
        if self._submitted:
            self._fill_masks(self._submitted[0])
        self._look_ahead()
        return outputs

    def take_dropped(self) -> StepOutputs:
        """Hand out what clients are told whose requests ended while no plan was in flight."""
        dropped, self._dropped = self._dropped, StepOutputs()
        return dropped

    def _measure(self, plan: Plan, result: StepResult) -> None:
        """Follow how fast prompts are computed, and how many tokens a step has time for; tell the
        scheduler when that has changed."""
        rate, step_tokens = self._prefill_rate(plan, result), self._rates.step_tokens
        if self._step_budget is not None:
            step_tokens = self._step_budget.observe(plan, result.duration_s)
        rates = MeasuredRates(rate, self._rates.copy_bytes_per_s, step_tokens)
        if rates != self._rates:
            self._rates = rates
            self.control(rates)

    def _prefill_rate(self, plan: Plan, result: StepResult) -> float:
        num_tokens, known = plan.num_scheduled_tokens, self._rates.prefill_tokens_per_s
        fewest = min(PREFILL_TOKENS, self._rates.step_tokens or PREFILL_TOKENS)
        if num_tokens < fewest or result.duration_s <= 0:
            return known
        rate = num_tokens / result.duration_s
        if abs(rate - known) <= RATE_CHANGE * known:
            return known
        return rate if known == 0 else (known + rate) / 2

    def close(self) -> None:
        """End. With stores: keep there what the device's index has, for KEEP_AT_END_S at most.
        Nobody watches that: these plans are nobody's."""
        until_s = self._clock.now() + KEEP_AT_END_S
        files, self._held_files = self._held_files, None  # what is let go now is not forgotten
        if files is not None:
            files.close()
        is_quiet = self._stores is not None and self._end_requests()
        for doors in self._watching:
            doors.close()
        if self._stores is not None:
            if is_quiet:
                self._flush(self._stores, until_s)
            self._stores.close(until_s, self._clock)
        self._forgo_masks(list(self._submitted)[1:])
        self.executor.close()
        self._drafting = None  # which may hold a model
        if self._grammars is not None:
            self._grammars.close()

    def _end_requests(self) -> bool:
        """Take what is in flight and end who is still there, and what is pinned, so that nobody
        holds a block; whether that was possible."""
        try:
            while self._death is None and self._submitted:
                self.take()
            for found in self.requests():
                self.control(Abort(found.request.request_id))
            for prefix in self.prefixes():
                self.control(Unpin(prefix.id))
            for held in self.held():
                self.control(Hold(held.id, 0.0))
        except Exception as error:
            logger.warning("what is cached is not kept: %s: %s", type(error).__name__, error)
            return False
        return self._death is None

    def _flush(self, stores: OpenStores, until_s: float) -> None:
        """Have what the device's index has kept, in parts that fit into host memory."""
        self.control(KeepCached())
        while True:
            while stores.num_open and self._clock.now() < until_s:
                self._wait_for_answer()
            plan = self._pass(self.doors.schedule(self._clock.now())).plan
            if plan is None or stores.num_open:
                return
            self.executor.submit(plan)
            result = self.executor.next_result()
            if result.error is not None:
                return
            self._pass(self.doors.update(result, self._clock.now()))

    def _submit(
        self, plan: Plan, sampling: Sampling, left_out: frozenset[int] = frozenset()
    ) -> None:
        """Hand over a plan without some of its rows. Of one that has lost all rows only the moves
        must not wait; without any it is not carried out, and the next one does what else it did."""
        carried_out = leave_out(plan, left_out)
        if len(plan.rows) and not len(carried_out.rows):
            carried_out = without_copies(carried_out)
        if self._carried_over is not None:
            carried_out = with_leftover(carried_out, self._carried_over)
        if not self._submitted:
            self._pacing.begin(self._clock.now())
        masks = MaskPromise() if len(carried_out.masked_rows) else None
        num_tokens = carried_out.num_scheduled_tokens
        step = Submitted(plan, sampling, carried_out, num_tokens, masks, left_out)
        self._submitted.append(step)
        if len(self._submitted) == 1:  # before the executor, which may carry it out at once
            self._fill_masks(self._submitted[0])
        self._carried_over = None if step.has_run else carried_out
        if step.has_run:
            self.executor.submit(carried_out, masks)

    def _fill_masks(self, step: Submitted) -> None:
        """Have the masks of the oldest plan in flight made: all results before it are in."""
        if step.masks is None:
            return
        assert self._grammars is not None, "who has a grammar is refused without them"
        sequences = dict(zip(step.plan.sample_rows.tolist(), step.sampling, strict=True))
        self._grammars.fill(step.masks, step.carried_out, sequences)

    def _forgo_masks(self, steps: Iterable[Submitted]) -> None:
        """Free plans whose masks are not made yet: the executor may wait for them."""
        for step in steps:
            if step.masks is not None and self._grammars is not None:
                self._grammars.forgo(step.masks, step.carried_out)

    def _recover(self, failed: Submitted, error: str) -> StepOutputs:
        """Repeat the oldest plan, which raised, in parts, or without its rows. Then carry out the
        later plans without rows of sequences that this ended or sent back: their tables are old."""
        later, self._submitted = self._submitted, deque()
        self._forgo_masks(later)
        for step in later:
            if step.has_run:
                self.executor.next_result()
        self._carried_over = None  # of one of these, if there is something; it is made again below
        self._death = "it was interrupted while it repeated a step that had failed"
        plan = failed.plan
        part = leave_out(failed.carried_out, failed.left_out)
        if self.scheduler.has_stages:
            logger.warning("step %d failed; what is in flight begins anew: %s", plan.step_id, error)
            result = give_all_up(part, [step.carried_out for step in later], error)
        elif self.scheduler.may_repeat_steps:
            logger.warning("step %d failed and is repeated in parts: %s", plan.step_id, error)
            result = bisect_step(self.executor, part, failed.masks)
        else:
            logger.warning(
                "step %d failed; its rows begin anew, one by one: %s", plan.step_id, error
            )
            result = give_rows_up(self.executor, part, error)
        if result.error or len(result.row_errors) == len(part.rows):
            # Perhaps no part of the plan was carried out. All but its moves may be done again; of
            # those the result tells whether they are lost.
            empty = leave_out(part, set(part.rows.tolist()))
            self._carried_over = dataclasses.replace(empty, moves=())
        outputs = self._update(combine(plan, [(part, result)]), later)
        for step in later:
            again = step.plan
            if self.scheduler.has_stages:
                again = dataclasses.replace(again, moves=())
            self._submit(again, step.sampling, step.left_out)
        self._death = None
        return outputs

    def _update(self, result: StepResult, later: Iterable[Submitted]) -> StepOutputs:
        """Pass a result on. later: the plans that are in flight behind it."""
        decisions = self._pass(self.doors.update(result, self._clock.now()))
        for step, left_out in zip(later, decisions.left_out, strict=True):
            step.left_out = left_out
        outputs = decisions.outputs
        if dropped := self.take_dropped().details:
            outputs = msgspec.structs.replace(outputs, details=[*dropped, *outputs.details])
        for update, finish in outputs.finished:
            if finish.reason == "error" and finish.error is not None:
                logger.error("request %s failed: %s", update.request_id, finish.error.message)
        return outputs

    def publish(self) -> None:
        """Tell the subscribers what has happened since the last step, such as an abort."""
        if not self._events:
            return
        events, self._events = self._events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)
