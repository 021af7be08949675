"""The core: scheduler and executor in one plain loop.

    add, control --> scheduler --> plan --> executor --> result --> scheduler --> outputs
                         |                                              |
                         +------------- attachments hear ---------------+

`plan` makes and submits a plan, `take` takes the oldest result, `_recover` repeats a failed step.
Each `step` plans as far ahead as the pipeline depth allows, takes the oldest result, and returns
the outputs. A caller that also waits for other events uses `rest_s` and `advance` instead.

All else around a step attaches to this loop (`loop/attachment.py`).
"""

import logging
from collections.abc import Callable

import msgspec

from quire.base.clock import Clock
from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.step_outputs import SequenceUpdate, StepOutputs
from quire.engine.executors.executor import Executor
from quire.engine.loop.attachment import Phase
from quire.engine.loop.bell import Bell
from quire.engine.loop.front import Attachments, Front
from quire.engine.loop.in_flight import NO_SAMPLING, InFlight, Sampling, StepInFlight, StepRates
from quire.engine.loop.recovery import combine, omit_rows, reduce_plan, repeat_step
from quire.runner.setup.step_size import StepBudget
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire")

Deliver = Callable[[StepOutputs], None]
SETTLE_S = 2.0
MAX_WAIT_S = 0.5  # maximum wait for an answer, before the loop checks whether one is overdue


class EngineCore(Front):
    """Loop of one model on one device. step_budget: None for the configured budget."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        limits: RequestLimits,
        step_budget: StepBudget | None = None,
    ) -> None:
        super().__init__(scheduler, clock, limits)
        self.executor = executor
        self.in_flight = InFlight(scheduler.rows.num_stages)
        self.bell = Bell()
        self._rates = StepRates(executor.copy_bytes_per_s(), step_budget)
        self._carried_over: Plan | None = None  # skipped; the next plan includes its rest
        self._dropped: list[SequenceUpdate] = []  # ends that no taken result has reported
        self.control(self._rates.known)
        executor.start(self.bell.ring)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._dropped)

    @property
    def num_in_flight(self) -> int:
        """Number of plans whose results are not taken yet."""
        return len(self.in_flight)

    # ---- the loop ----------------------------------------------------------------------------

    def step(self) -> StepOutputs:
        """Plan as far ahead as possible, wait for one result and take it. Return at once if there
        is nothing to do. Raises EngineError, now and in later calls, if the core has failed."""
        return self._turn(waits=True)

    def advance(self, deliver: Deliver = lambda outputs: None) -> StepOutputs:
        """Plan if a plan is due, and take a result if there is one. Raises EngineError like
        `step`. deliver: called with the outputs before the subscribers get the events."""
        return self._turn(waits=False, deliver=deliver)

    def settle(self) -> None:
        """Take steps while there is work that no request waits for, for up to SETTLE_S. Raises
        EngineError."""
        until_s = self._clock.now() + SETTLE_S
        while self.scheduler.has_work and not self.requests() and self._clock.now() < until_s:
            self._turn(waits=True)

    def rest_s(self) -> float | None:
        """Return the seconds until there is something to do. None: until a message arrives or the
        bell rings."""
        pending = self.attachments.pending
        if self._has_lost_executor or any(each.has_answers for each in pending):
            return 0.0
        now = self._clock.now()
        if not self.has_work:
            return None if self._due_s is None else max(0.0, self._due_s - now)
        if self._is_answered or self._death is not None:
            return 0.0
        if self._has_nothing_to_plan:
            late_s = None if self.in_flight else self._next_s
            return None if late_s is None else max(0.0, late_s - now)
        if not self.in_flight:
            return 0.0
        return None if self._holds_back else max(0.0, self.in_flight.due_s - now)

    def plan(self) -> Plan | None:
        """Plan and submit one step. Return None if there is nothing to plan."""
        for message in self.attachments.before_plan(len(self.in_flight)):
            self.control(message)
        decisions = self.schedule()
        plan = decisions.plan
        self._has_nothing_to_plan = plan is None
        self._dropped += decisions.outputs.details
        if plan is not None:
            self._submit(plan, NO_SAMPLING if decisions.sampling is None else decisions.sampling)
        return plan

    def take(self) -> StepOutputs:
        """Take the result of the oldest plan in flight, and return its outputs."""
        step = self.in_flight[0]
        has_run, carried_out = step.has_run, step.carried_out
        result = self.executor.next_result() if has_run else combine(carried_out, [])
        self.in_flight.end(self._clock.now())
        self._has_nothing_to_plan = False
        if result.error is not None:
            return self._recover(step, result.error)
        if len(carried_out.rows):
            rates = self._rates.observe(step, result)
            if rates is not None:
                self.control(rates)
        step.result = result
        self.attachments.on_step(step, Phase.DONE)
        if carried_out is not step.plan:
            result = combine(step.plan, [(carried_out, result)])
        outputs = self._update(result, list(self.in_flight))
        if self.in_flight:
            self.attachments.on_step(self.in_flight[0], Phase.NEXT)
        return outputs

    def take_dropped(self) -> StepOutputs:
        """Return the outputs of requests that ended without a result."""
        dropped, self._dropped = self._dropped, []
        return StepOutputs(details=dropped)

    def wait_for_answers(self) -> None:
        """Give the scheduler the attachments' answers; without any, wait up to MAX_WAIT_S."""
        self.bell.forget()
        if not self._take_answers():
            self.bell.wait(MAX_WAIT_S)
            self._take_answers()

    def close(self) -> None:
        """Close the attachments, in their order, then the executor."""
        self.attachments.close(self)
        self._void(list(self.in_flight)[1:])
        self.executor.close()
        self.attachments = Attachments()  # the old ones may hold a model

    # ------------------------------------------------------------------------------------------

    def _turn(self, waits: bool, deliver: Deliver = lambda outputs: None) -> StepOutputs:
        """Do one turn of the loop. waits: whether to wait for a result, or an attachment's
        answer. deliver: as in `advance`."""
        if self._death is not None:
            raise EngineError(f"the engine has stopped: {self._death}")
        try:
            if self._has_lost_executor:
                self.executor.next_result()  # raises
            self._take_answers()
            while not self._holds_back and (waits or self._is_due):
                if self.plan() is None and not (waits and self._has_waited()):
                    break
            outputs = StepOutputs()
            if not self.in_flight:
                outputs = self.take_dropped()
            elif waits or self._is_answered:
                outputs = self.take()
                if not waits and self.in_flight and not self._holds_back and self._is_due:
                    self.plan()  # plan before the outputs are sent: steps are short
        except EngineError as error:
            self._death = str(error)
            raise
        except Exception as error:
            raise self._failure(error) from error
        deliver(outputs)
        self.publish()
        return outputs

    def _take_answers(self) -> bool:
        """Give the scheduler the attachments' answers; return whether there were any."""
        answers = self.attachments.answers(self._clock.now())
        for answer in answers:
            self.control(answer)
        return bool(answers)

    def _has_waited(self) -> bool:
        """Wait for an answer if there is nothing else to do; return whether it waited."""
        is_idle = not self.in_flight and not self._dropped and self.has_work
        if not (is_idle and any(each.num_open for each in self.attachments.pending)):
            return False
        self.wait_for_answers()
        return True

    @property
    def _has_lost_executor(self) -> bool:
        """Whether the executor reports, with nothing in flight, that it has failed."""
        return not self.in_flight and self.executor.is_ready()

    @property
    def _is_answered(self) -> bool:
        """Whether the oldest plan in flight has a result."""
        if not self.in_flight:
            return False
        return not self.in_flight[0].has_run or self.executor.is_ready()

    @property
    def _is_due(self) -> bool:
        """Whether to plan the next step now: the device is idle, or will be soon."""
        if self._has_nothing_to_plan:
            late_s = self._next_s
            return late_s is not None and late_s <= self._clock.now()
        if not self.in_flight or self._is_answered:
            return True
        return self.in_flight.due_s <= self._clock.now()

    @property
    def _next_s(self) -> float | None:
        """Time of the next due event of the scheduler or of an attachment."""
        times = [self._due_s, *(each.next_s for each in self.attachments.pending)]
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def _holds_back(self) -> bool:
        """Whether the next plan waits for a result, because the pipeline is full or an attachment
        holds plans back."""
        if len(self.in_flight) >= self.scheduler.depth:
            return True
        return bool(self.in_flight) and self.attachments.holds_plans

    def _submit(
        self, plan: Plan, sampling: Sampling, omitted: frozenset[int] = frozenset()
    ) -> None:
        """Submit a plan without the rows in `omitted`. If it loses all rows, still carry out its
        moves. If it has no moves either, skip it and merge the rest into the next plan."""
        carried_out, carried_over = plan, self._carried_over
        if omitted or carried_over is not None:
            carried_out = reduce_plan(plan, omitted, carried_over)
        masks = MaskPromise() if len(carried_out.masked_rows) else None
        num_tokens = carried_out.num_scheduled_tokens
        step = StepInFlight(plan, sampling, carried_out, num_tokens, masks, omitted)
        self.in_flight.begin(step, self._clock.now())
        if len(self.in_flight) == 1:  # before the executor, which may carry it out at once
            self.attachments.on_step(step, Phase.NEXT)
        has_run = step.has_run
        self._carried_over = None if has_run else carried_out
        if has_run:
            self.executor.submit(carried_out, masks)

    def _recover(self, failed: StepInFlight, error: str) -> StepOutputs:
        """Repeat the oldest plan, which failed, in parts or without its rows. Then submit the later
        plans again, without the rows of sequences that the failure ended or preempted."""
        later = self.in_flight.take_all()
        self._void(later)
        for step in later:
            if step.has_run:
                self.executor.next_result()
        self._death = "it was interrupted while it repeated a failed step"
        scheduler = self.scheduler
        part = omit_rows(failed.carried_out, failed.omitted)
        is_repeatable, has_stages = scheduler.may_repeat_steps, scheduler.has_stages
        plans = [step.carried_out for step in later]
        result = repeat_step(
            self.executor, part, plans, failed.masks, error, is_repeatable, has_stages
        )
        self._carried_over = None  # the later plans are submitted again below, and set it
        if result.error or len(result.row_errors) == len(part.rows):
            # Perhaps no part of the plan was carried out. All but its moves may be repeated; the
            # result shows whether the moves are lost.
            empty = omit_rows(part, set(part.rows.tolist()))
            self._carried_over = empty.replace(moves=())
        outputs = self._update(combine(failed.plan, [(part, result)]), later)
        for step in later:
            again = step.plan.replace(moves=()) if has_stages else step.plan
            self._submit(again, step.sampling, step.omitted)
        self._death = None
        return outputs

    def _void(self, steps: list[StepInFlight]) -> None:
        """Notify attachments of void steps, whose masks the executor may wait for."""
        for step in steps:
            self.attachments.on_step(step, Phase.VOID)

    def _update(self, result: StepResult, later: list[StepInFlight]) -> StepOutputs:
        """Give the scheduler a result, and return its outputs. later: the steps in flight after
        it."""
        decisions = self.update(result)
        for step, omitted in zip(later, decisions.omitted, strict=True):
            step.omitted = omitted
        outputs = decisions.outputs
        if self._dropped:
            details = [*self.take_dropped().details, *outputs.details]
            outputs = msgspec.structs.replace(outputs, details=details)
        for update, finish in outputs.finished:
            if finish.reason == "error" and finish.error is not None:
                name = update.request_id
                about = {"request_id": name}
                logger.error("request %s failed: %s", name, finish.error.message, extra=about)
        return outputs
