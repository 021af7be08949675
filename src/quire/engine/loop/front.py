"""The front of a core: the scheduler's four doors, and the attachments that receive its decisions.
It also has the subscribers of events, and the questions that callers ask."""

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

from quire.base.clock import Clock
from quire.base.errors import EngineError, RequestError
from quire.base.events import Event
from quire.base.messages import Control, PinnedPrefix, Request, RetainedRequest
from quire.base.plan import StepResult
from quire.base.requests.retention import check_fork
from quire.base.requests.validation import RequestLimits
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
Method = tuple[Attachment, Callable[..., Any]]  # an attachment, and a method of it


class Attachments:
    """Attachments of one loop, in order. Each method is called only on the attachments that
    override it."""

    def __init__(self) -> None:
        self.all: list[Attachment] = []
        self._index()

    def add(self, attachment: Attachment) -> None:
        """Add an attachment. Attachments of equal order stay in the order of attaching."""
        self.all = sorted([*self.all, attachment], key=lambda each: each.order)
        self._index()

    def remove(self, attachment: Attachment) -> None:
        """Remove an attachment. One that is not attached is ignored."""
        self.all = [each for each in self.all if each is not attachment]
        self._index()

    def accept(self, request: Request) -> Request:
        for each, accept in self._accept:
            try:
                request = accept(request)
            except RequestError:
                raise
            except Exception as error:
                self._fail(each, error)
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        self._call(self._hear, given, decisions)

    def answers(self, now: float) -> list[Control]:
        return list(chain.from_iterable(self._call(self._answers, now)))

    def before_plan(self, num_in_flight: int) -> list[Control]:
        for each in self.all:
            each.rests -= each.rests > 0
        return list(chain.from_iterable(self._call(self._before_plan, num_in_flight)))

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        self._call(self._on_step, step, phase)

    def close(self, loop: Loop) -> None:
        """Close all attachments, in order, even if some of them raise."""
        for each in self.all:
            try:
                each.close(loop)
            except Exception:
                logger.exception("%s did not close", type(each).__name__)

    @property
    def pending(self) -> list[Pending]:
        """Reasons of the attachments for the loop to wait."""
        return [each.pending for each in self._pending if not each.rests]

    @property
    def holds_plans(self) -> bool:
        """Whether the next plan waits until no plan is in flight."""
        return any(pending.holds_plans for pending in self.pending)

    def _call(self, methods: list[Method], *arguments: Any) -> list[Any]:
        """Call a method of the attachments that do not rest. Return its results, except where it
        raises."""
        results: list[Any] = []
        for each, method in methods:
            if each.rests:
                continue
            try:
                results.append(method(*arguments))
            except Exception as error:
                self._fail(each, error)
        return results

    def _fail(self, attachment: Attachment, error: Exception) -> None:
        """Raise the error of a vital attachment, or detach another one."""
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

        def methods(name: str) -> list[Method]:
            return [(each, getattr(each, name)) for each in overriding(name)]

        self._accept, self._hear = methods("accept"), methods("hear")
        self._answers, self._before_plan = methods("answers"), methods("before_plan")
        self._on_step, self._pending = methods("on_step"), overriding("pending")


class Front:
    """Scheduler and its attachments. Only these four doors change the scheduler."""

    def __init__(self, scheduler: Scheduler, clock: Clock, limits: RequestLimits) -> None:
        self.scheduler = scheduler
        self.doors: Doors = scheduler  # or the attachment in front of them
        self.limits = limits
        self.attachments = Attachments()
        self._clock = clock
        self._subscribers: list[Subscriber] = []
        self._events: list[Event] = []  # not delivered yet
        self._has_nothing_to_plan = False  # until the next call of a door
        self._due_s: float | None = None  # time when something becomes due by itself
        self._death: str | None = None  # why this core has failed

    # ---- the scheduler's doors ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served, EngineBusy."""
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
        """Have the scheduler make a plan, without submitting it."""
        return self._hear(None, self.doors.schedule(self._clock.now()))

    def update(self, result: StepResult) -> Decisions:
        """Give the scheduler the result of the oldest plan."""
        return self._hear(result, self.doors.update(result, self._clock.now()))

    def _hear(self, given: Given, decisions: Decisions) -> Decisions:
        """Pass the decisions of a door to the attachments. Raises EngineError if a vital one
        fails."""
        self._has_nothing_to_plan = False
        self._due_s = decisions.next_s
        self._events += decisions.events
        try:
            self.attachments.hear(given, decisions)
        except Exception as error:
            raise self._failure(error) from error
        return decisions

    def _failure(self, error: Exception) -> EngineError:
        """Record that this core has failed, and return the error to raise."""
        self._death = f"{type(error).__name__}: {error}"
        return EngineError(f"the engine cannot continue: {self._death}")

    # ---- attachments -------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Add an attachment, which follows the loop from now on."""
        if isinstance(attachment, DoorWatcher):
            assert self.doors is self.scheduler, "at most one attachment stands at the doors"
            self.doors = attachment
        self.attachments.add(attachment)

    def detach(self, attachment: Attachment) -> None:
        """Remove an attachment, without closing it."""
        if isinstance(attachment, DoorWatcher):
            self.doors = self.scheduler
        self.attachments.remove(attachment)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver all later events to a subscriber."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Deliver no more events to a subscriber."""
        self._subscribers = [each for each in self._subscribers if each is not subscriber]

    def publish(self) -> None:
        """Deliver the events since the last call. It runs between two steps, so that no subscriber
        delays a plan. Errors of subscribers reach the caller."""
        if not self._events:
            return
        events, self._events = self._events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)

    # ---- questions ---------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time on the clock of this core, in seconds."""
        return self._clock.now()

    @property
    def has_failed(self) -> bool:
        """Whether this core has failed."""
        return self._death is not None

    def has(self, request_id: str) -> bool:
        """Return whether a request is known and has not ended."""
        return self.scheduler.has(request_id)

    def requests(self) -> tuple[RequestView, ...]:
        """List the requests that have not ended."""
        return self.scheduler.requests()

    def view(self) -> SchedulerView:
        """Return the scheduler's current state."""
        return self.scheduler.view()

    def prefixes(self, tenant: str | None = None) -> list[PinnedPrefix]:
        """List the pinned prefixes, oldest first. tenant: None for all tenants."""
        return self.scheduler.prefixes(self._clock.now(), tenant)

    def held(
        self, request_id: str | None = None, index: int = 0, tenant: str | None = None
    ) -> list[RetainedRequest]:
        """List the retained requests, like `Scheduler.held`."""
        return self.scheduler.held(self._clock.now(), request_id, index, tenant)
