"""The front of a core: the scheduler's four doors with attachments that hear what they decide, the
events of a core, and the questions that callers ask."""

from collections.abc import Callable

from quire.base.clock import Clock
from quire.base.errors import EngineError
from quire.base.events import Event
from quire.base.messages import Control, HeldRequest, PinnedPrefix, Request
from quire.base.plan import StepResult
from quire.base.validation import RequestLimits, check_fork
from quire.engine.loop.attachment import Attachment, Doors, DoorWatcher, Given
from quire.engine.loop.attachments import Attachments
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.views import RequestView, SchedulerView

Subscriber = Callable[[Event], None]


class EventFeed(Attachment):
    """Collects events, and delivers them when `publish` is called: between two steps, so that no
    subscriber delays a plan. What a subscriber raises reaches the caller of `publish`."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._events: list[Event] = []  # not delivered yet

    def subscribe(self, subscriber: Subscriber) -> None:
        """Deliver every event from now on."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Deliver nothing any more."""
        self._subscribers = [each for each in self._subscribers if each is not subscriber]

    def hear(self, given: Given, decisions: Decisions) -> None:
        self._events += decisions.events

    def publish(self) -> None:
        """Deliver what has happened since the last time."""
        if not self._events:
            return
        events, self._events = self._events, []
        for subscriber in self._subscribers:
            for event in events:
                subscriber(event)


class Front:
    """A scheduler and its attachments. Nothing but these four doors changes the scheduler."""

    def __init__(self, scheduler: Scheduler, clock: Clock, limits: RequestLimits) -> None:
        self.scheduler = scheduler
        self.doors: Doors = scheduler  # or the attachment that stands before them
        self.limits = limits
        self.attachments = Attachments()
        self._clock = clock
        self._events = EventFeed()
        self._has_nothing_to_plan = False  # before something comes in
        self._due_s: float | None = None  # when something becomes due by itself
        self._death: str | None = None  # why this core cannot go on
        self.attachments.add(self._events)

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
        """Deliver every event from now on, between two steps."""
        self._events.subscribe(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Deliver no event any more."""
        self._events.unsubscribe(subscriber)

    def publish(self) -> None:
        """Deliver the events since the last step, such as an abort."""
        self._events.publish()

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
