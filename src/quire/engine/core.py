"""The core: scheduler, KV manager and executor in one plain loop.

Requests and control messages come in through `add` and `control`; each `step` plans as far ahead as
the pipeline depth allows, takes the oldest result, and returns what it gave each request. A step
that raises is taken back; the requests of that step end with an error, all others go on.
"""

import logging
from collections.abc import Callable

from quire.base.clock import Clock
from quire.base.errors import StepFailed
from quire.base.events import Event
from quire.base.messages import Abort, Control, Request, SequenceOutput
from quire.base.validation import RequestLimits
from quire.engine.executor import Executor
from quire.scheduler.results import StepOutputs
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

logger = logging.getLogger("quire")

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
        """Plan, execute, take one result. Returns at once if there is nothing to do."""
        scheduler = self.scheduler
        while (plan := scheduler.schedule(self._clock.now())) is not None:
            self.executor.submit(plan)
        if not scheduler.flights:
            return []
        result = self.executor.next_result()
        if result.error is None:
            outputs = _messages(scheduler.update(result, self._clock.now()))
        else:
            for _ in range(len(scheduler.flights) - 1):
                self.executor.next_result()  # of plans built on the failed one
            outputs = self._fail(scheduler.update(result, self._clock.now()), result.error)
        self._publish()
        return outputs

    def close(self) -> None:
        self.executor.close()

    def _fail(self, undone: StepOutputs, error: str) -> list[SequenceOutput]:
        """End the requests of a step that raised."""
        logger.error("%s", StepFailed(f"a step failed and was taken back: {error}"))
        outputs = []
        for sequence in undone.others:
            request_id = sequence.request.request_id
            self.scheduler.control(Abort(request_id, "error"), self._clock.now())
            outputs.append(
                SequenceOutput(request_id, [], "error", error=f"the step failed: {error}")
            )
        return outputs

    def _publish(self) -> None:
        events, self.scheduler.events = self.scheduler.events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)


def _messages(outputs: StepOutputs) -> list[SequenceOutput]:
    """One message per sequence that has news."""
    if outputs.plain:
        return [
            SequenceOutput(s.request.request_id, [token], num_cached_tokens=s.num_cached_tokens)
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
    return messages


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
    )
