"""The core: scheduler, KV manager and executor in one plain loop.

Requests and control messages come in through `add` and `control`; each `step` plans as far ahead as
the pipeline depth allows, takes the oldest result, and returns what it gave each request. A step
that raises is repeated in parts (`engine/bisect.py`): the requests whose rows fail alone end with
an error, all others get what they would have got.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from quire.base.clock import Clock
from quire.base.errors import EngineError
from quire.base.events import Event
from quire.base.messages import BeamOutput, Control, MeasuredRates, Request, SequenceOutput
from quire.base.plan import Int32, Plan, StepResult
from quire.base.validation import RequestLimits
from quire.engine.bisect import bisect_step, combine, leave_out
from quire.engine.executor import Executor
from quire.scheduler.beams import Hypothesis
from quire.scheduler.results import StepOutputs
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

logger = logging.getLogger("quire")

PREFILL_TOKENS = 32  # a step of fewer says little of how fast a prompt is computed
RATE_CHANGE = 0.2

Subscriber = Callable[[Event], None]


class EngineCore:
    """One model on one device, and everybody who waits for it."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, limits: RequestLimits
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self._clock = clock
        self._subscribers: list[Subscriber] = []
        self._submitted: deque[Plan] = deque()  # the plans in flight, as the executor got them
        self._unreleased: Int32 = np.empty(0, np.int32)  # rows that the next plan must release
        self._death: str | None = None
        self._rates = MeasuredRates(copy_bytes_per_s=executor.copy_bytes_per_s())
        self.control(self._rates)
        executor.start()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def subscribe(self, subscriber: Subscriber) -> None:
        """Hear of every event from now on."""
        self._subscribers.append(subscriber)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served."""
        self.limits.check(request)
        self.scheduler.add(request, self._clock.now())

    def control(self, message: Control) -> None:
        self.scheduler.control(message, self._clock.now())

    def step(self) -> list[SequenceOutput]:
        """Plan, execute, take one result. Returns at once if there is nothing to do. Raises
        EngineError, then and ever after, if the core cannot go on."""
        if self._death is not None:
            raise EngineError(f"the engine has stopped: {self._death}")
        try:
            while self.plan() is not None:
                pass
            outputs = _messages(self.take()) if self.scheduler.flights else []
        except EngineError as error:
            self._death = str(error)
            raise
        except Exception as error:
            self._death = f"{type(error).__name__}: {error}"
            raise EngineError(f"the engine cannot go on: {self._death}") from error
        self.publish()
        return outputs

    def plan(self) -> Plan | None:
        """Plan one step and hand it over, if there is something to plan."""
        plan = self.scheduler.schedule(self._clock.now())
        if plan is not None:
            self._submit(plan)
        return plan

    def take(self) -> StepOutputs:
        """Take the result of the oldest plan in flight."""
        flight, submitted = self.scheduler.flights[0], self._submitted[0]
        has_run = len(submitted.rows) > 0
        result = self.executor.next_result() if has_run else combine(submitted, [])
        self._submitted.popleft()
        if result.error is not None:
            return self._recover(submitted, result.error)
        self._measure(submitted, result)
        if submitted is not flight.plan:
            result = combine(flight.plan, [(submitted, result)])
        return self._update(result)

    def _measure(self, plan: Plan, result: StepResult) -> None:
        """Follow how fast prompts are computed; tell the scheduler when that has changed."""
        num_tokens = plan.num_scheduled_tokens
        if num_tokens < PREFILL_TOKENS or result.duration_s <= 0:
            return
        rate, known = num_tokens / result.duration_s, self._rates.prefill_tokens_per_s
        if abs(rate - known) > RATE_CHANGE * known:
            new = rate if known == 0 else (known + rate) / 2
            self._rates = MeasuredRates(new, self._rates.copy_bytes_per_s)
            self.control(self._rates)

    def close(self) -> None:
        self.executor.close()

    def _submit(self, plan: Plan) -> None:
        """Hand over a plan. One that has lost all rows is not carried out."""
        if len(self._unreleased):
            released = np.concatenate([self._unreleased, plan.released])
            plan = dataclasses.replace(plan, released=released)
        self._submitted.append(plan)
        if len(plan.rows):
            self._unreleased = plan.released[:0]
            self.executor.submit(plan)
        else:
            self._unreleased = plan.released

    def _recover(self, failed: Plan, error: str) -> StepOutputs:
        """The oldest plan raised: repeat it in parts, then carry out the later ones without the
        rows of sequences that this ended or sent back (their block tables may be out of date)."""
        later = list(self._submitted)
        for plan in later:
            if len(plan.rows):
                self.executor.next_result()
        self._submitted.clear()
        self._death = "it was interrupted while it repeated a step that had failed"
        logger.warning("step %d failed and is repeated in parts: %s", failed.step_id, error)
        flight = self.scheduler.flights[0]
        part = leave_out(failed, flight.left_out)
        result = bisect_step(self.executor, part)
        if len(result.row_errors) == len(part.rows):
            self._unreleased = part.released  # perhaps no part of the plan was carried out
        outputs = self._update(combine(flight.plan, [(part, result)]))
        for plan, in_flight in zip(later, self.scheduler.flights, strict=True):
            self._submit(leave_out(plan, in_flight.left_out))
        self._death = None
        return outputs

    def _update(self, result: StepResult) -> StepOutputs:
        outputs = self.scheduler.update(result, self._clock.now())
        for sequence in outputs.others:
            ending = outputs.endings.get(sequence.arrival)
            if ending is not None and ending.error is not None:
                logger.error("request %s failed: %s", sequence.request.request_id, ending.error)
        return outputs

    def publish(self) -> None:
        """Tell the subscribers what has happened since the last step, such as an abort."""
        events, self.scheduler.events = self.scheduler.events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)


def _messages(outputs: StepOutputs) -> list[SequenceOutput]:
    """One message per sequence that has news."""
    if outputs.plain:
        return [
            SequenceOutput(
                s.request.request_id, [token], num_cached_tokens=s.num_cached_tokens, index=s.index
            )
            for s, token in zip(outputs.sequences, outputs.token_ids.tolist(), strict=True)
        ]
    messages = []
    tokens = dict(
        zip((s.arrival for s in outputs.sequences), outputs.token_ids.tolist(), strict=True)
    )
    seen: set[int] = set()
    for sequence in [*outputs.sequences, *outputs.others]:
        if sequence.arrival not in seen:
            seen.add(sequence.arrival)
            messages.append(_message(sequence, tokens.get(sequence.arrival), outputs))
    for sequence, hypotheses in outputs.hypotheses:
        request = sequence.request
        beams = [_beam(request, hypothesis) for hypothesis in hypotheses]
        messages.append(
            SequenceOutput(
                request.request_id,
                [],
                beams[0].finish_reason,
                num_cached_tokens=max(0, sequence.num_cached_tokens),
                num_preemptions=sequence.num_preemptions,
                beams=beams,
            )
        )
    return messages


def _beam(request: Request, hypothesis: Hypothesis) -> BeamOutput:
    last = hypothesis.token_ids[-1]
    is_named = hypothesis.is_stop and last not in request.eos_token_ids
    return BeamOutput(
        list(hypothesis.token_ids),
        hypothesis.score,
        hypothesis.cumulative_logprob,
        "stop" if hypothesis.is_stop else "length",
        last if is_named else None,
    )


def _message(sequence: Sequence, token: int | None, outputs: StepOutputs) -> SequenceOutput:
    arrival = sequence.arrival
    ending = outputs.endings.get(arrival)
    candidates = outputs.candidates.get(arrival)
    return SequenceOutput(
        request_id=sequence.request.request_id,
        token_ids=[] if token is None else [token],
        finish_reason=ending.reason if ending else None,
        stop_reason=ending.stop_reason if ending else None,
        candidates=None if candidates is None else [candidates],
        prompt_candidates=outputs.prompt_candidates.get(arrival),
        num_cached_tokens=max(0, sequence.num_cached_tokens),
        num_preemptions=sequence.num_preemptions,
        error=ending.error if ending else None,
        index=sequence.index,
    )
