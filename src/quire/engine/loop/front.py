"""The front of a core: the scheduler's four doors, the attachments that hear what the doors decide,
subscribers of events, and the questions that callers ask."""

import logging
from collections.abc import Callable
from itertools import chain
from typing import TypeVar

from quire.base.clock import Clock
from quire.base.errors import EngineError, RequestError
from quire.base.events import Event
from quire.base.messages import Control, HeldRequest, PinnedPrefix, Request
from quire.base.plan import StepResult
from quire.base.requests.validation import RequestLimits, check_fork
from quire.engine.loop.attachment import (
    Attachment,
    Doors,
    DoorWatcher,
    Given,
    Loop,
    Pending,
    Phase,
)
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.views import RequestView, SchedulerView

logger = logging.getLogger("quire")

Subscriber = Callable[[Event], None]
Result = TypeVar("Result")


class Attachments:
    """The attachments of one loop, in order. Each method is called only on the attachments that
    override it."""

    def __init__(self) -> None:
        self.all: list[Attachment] = []
        self._index()

    def add(self, attachment: Attachment) -> None:
        """Attach; those of equal order stay in the order of attaching."""
        self.all = sorted([*self.all, attachment], key=lambda each: each.order)
        self._index()

    def remove(self, attachment: Attachment) -> None:
        """Detach; an attachment that is not attached is ignored."""
        self.all = [each for each in self.all if each is not attachment]
        self._index()

    def accept(self, request: Request) -> Request:
        for each in self._accept:
            try:
                request = each.accept(request)
            except RequestError:
                raise
            except Exception as error:
                self._fail(each, error)
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        self._call(self._hear, lambda each: each.hear(given, decisions))

    def answers(self, now: float) -> list[Control]:
        return list(chain.from_iterable(self._call(self._answers, lambda each: each.answers(now))))

    def before_plan(self, num_in_flight: int) -> list[Control]:
        found = self._call(self._before_plan, lambda each: each.before_plan(num_in_flight))
        return list(chain.from_iterable(found))

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        self._call(self._on_step, lambda each: each.on_step(step, phase))

    def close(self, loop: Loop) -> None:
        """Close all, in order. What one raises keeps none of the others from it."""
        for each in self.all:
            try:
                each.close(loop)
            except Exception:
                logger.exception("%s did not close", type(each).__name__)

    @property
    def pending(self) -> list[Pending]:
        """List what the loop may wait for."""
        return [each.pending for each in self._pending]

    @property
    def holds_plans(self) -> bool:
        """Whether the next plan waits until none is in flight."""
        return any(each.pending.holds_plans for each in self._pending)

    def _call(
        self, attachments: list[Attachment], call: Callable[[Attachment], Result]
    ) -> list[Result]:
        """Return what each attachment returns, without those that fail."""
        results: list[Result] = []
        for each in attachments:
            try:
                results.append(call(each))
            except Exception as error:
                self._fail(each, error)
        return results

    def _fail(self, attachment: Attachment, error: Exception) -> None:
        """Raise what a vital attachment raised; detach another one."""
        if attachment.is_vital:
            raise error
        name = type(attachment).__name__
        logger.warning("%s is detached: it raised %s: %s", name, type(error).__name__, error)
        self.remove(attachment)

    def _index(self) -> None:
        """List the attachments that override each method; the others are never called."""

        def overriding(method: str) -> list[Attachment]:
            default = getattr(Attachment, method)
            return [each for each in self.all if getattr(type(each), method) is not default]

        self._accept, self._hear = overriding("accept"), overriding("hear")
        self._answers, self._before_plan = overriding("answers"), overriding("before_plan")
        self._on_step, self._pending = overriding("on_step"), overriding("pending")


class Front:
    """A scheduler and its attachments. Nothing but these four doors changes the scheduler."""

    def __init__(self, scheduler: Scheduler, clock: Clock, limits: RequestLimits) -> None:
        self.scheduler = scheduler
        self.doors: Doors = scheduler  # or the attachment that stands before them
        self.limits = limits
        self.attachments = Attachments()
        self._clock = clock
        self._subscribers: list[Subscriber] = []
        self._events: list[Event] = []  # not delivered yet
        self._has_nothing_to_plan = False  # before something comes in
        self._due_s: float | None = None  # when something becomes due by itself
        self._death: str | None = None  # why this core cannot go on

    # ---- the scheduler's doors ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for what can never be served, EngineBusy."""
        fork, num_known = request.fork, 0
        if fork is not None:
            num_known = check_fork(request, self.held(fork.request_id, fork.index))
        self.limits.check(request, num_known)
        request = self.attachments.accept(request)
        decisions = self._hear(request, self.doors.add(request, self._clock.now()))
        if decisions.refusal is not None:
            raise decisions.refusal

    def control(self, message: Control) -> None:
        """Give the scheduler a message."""
        self._hear(message, self.doors.control(message, self._clock.now()))

    def schedule(self) -> Decisions:
        """Let the scheduler make a plan. It is not submitted."""
        return self._hear(None, self.doors.schedule(self._clock.now()))

    def update(self, result: StepResult) -> Decisions:
        """Give the scheduler the result of the oldest plan."""
        return self._hear(result, self.doors.update(result, self._clock.now()))

    def _hear(self, given: Given, decisions: Decisions) -> Decisions:
        """Let attachments hear what a door has decided. Raises EngineError if one is lost that
        requests depend on."""
        self._has_nothing_to_plan = False
        self._due_s = decisions.next_s
        self._events += decisions.events
        try:
            self.attachments.hear(given, decisions)
        except Exception as error:
            raise self._failure(error) from error
        return decisions

    def _failure(self, error: Exception) -> EngineError:
        """Note that this core cannot go on, and return what to raise."""
        self._death = f"{type(error).__name__}: {error}"
        return EngineError(f"the engine cannot continue: {self._death}")

    # ---- attachments -------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Let an attachment follow the loop from now on."""
        if isinstance(attachment, DoorWatcher):
            assert self.doors is self.scheduler, "at most one attachment stands at the doors"
            self.doors = attachment
        self.attachments.add(attachment)

    def detach(self, attachment: Attachment) -> None:
        """Let an attachment follow the loop no longer. It is not closed."""
        if isinstance(attachment, DoorWatcher):
            self.doors = self.scheduler
        self.attachments.remove(attachment)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver every event from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Deliver no event any more."""
        self._subscribers = [each for each in self._subscribers if each is not subscriber]

    def publish(self) -> None:
        """Deliver the events since the last call: between two steps, so that no subscriber delays a
        plan. What a subscriber raises reaches the caller."""
        if not self._events:
            return
        events, self._events = self._events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)

    # ---- questions ---------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on the clock of this core."""
        return self._clock.now()

    @property
    def has_failed(self) -> bool:
        """Whether this core cannot go on."""
        return self._death is not None

    def has(self, request_id: str) -> bool:
        """Tell whether a request has not ended."""
        return self.scheduler.has(request_id)

    def requests(self) -> tuple[RequestView, ...]:
        """List the requests that have not ended."""
        return self.scheduler.requests()

    def view(self) -> SchedulerView:
        """Return the scheduler's state as it is now."""
        return self.scheduler.view()

    def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        """List the pinned prefixes, oldest first. tenant: whose; None is everybody's."""
        return self.scheduler.prefixes(self._clock.now(), tenant)

    def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[HeldRequest]:
        """List what is held, as `Scheduler.held` does."""
        return self.scheduler.held(self._clock.now(), request_id, index, tenant)
