"""Attachments: features that follow the loop of an `EngineCore`, which knows none of them by name.

    add ----> accept --+
    control -----------+--> the scheduler's door --> Decisions --> hear
    plan ---> before_plan --> schedule --> Decisions --> hear
    take ---> on_step(DONE) --> update --> Decisions --> hear
    each turn of the loop: answers --> control
    close --> close

The loop calls attachments by their `order`, then in the order of attaching. An attachment gets the
scheduler's decisions as `Decisions`, and reads all else through the core's questions. It changes
the scheduler only by messages, which it returns from `answers` and `before_plan`. The loop passes
them to `Scheduler.control`.

This attachment aborts a request as soon as its tenant has received more tokens than allowed:

    class TokenLimit(Attachment):
        is_vital = False

        def __init__(self, limit: int) -> None:
            self._limit, self._used = limit, Counter[str]()
            self._late: list[Control] = []

        def hear(self, given: Given, decisions: Decisions) -> None:
            ...  # count tokens, collect Abort messages in self._late

        @property
        def pending(self) -> Pending:
            return Pending(has_answers=bool(self._late))

        def answers(self, now: float) -> Sequence[Control]:
            late, self._late = self._late, []
            return late

    core.attach(TokenLimit(1000))
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from quire.base.messages import Control, PinnedPrefix, Request, RetainedRequest
from quire.base.plan import StepResult
from quire.base.step_outputs import StepOutputs
from quire.engine.executors.executor import Executor
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.decisions import Decisions
from quire.scheduler.views import RequestView

# Input of a door: a request, a message, a result, or nothing (`schedule`).
Given = Request | Control | StepResult | None


class Phase(enum.Enum):
    """Event in the life of a step in flight."""

    NEXT = "next"  # it is the oldest in flight: the results of all earlier steps were taken
    DONE = "done"  # its result has arrived; the scheduler has not taken it yet
    VOID = "void"  # its result will not count; the executor may still wait for its masks


class Pending(NamedTuple):
    """Reasons of an attachment for the loop to wait."""

    has_answers: bool = False  # `answers` returns something now
    num_open: int = 0  # number of answers that are still to come
    next_s: float | None = None  # when to call `answers` even if nothing arrived; None is never
    holds_plans: bool = False  # no plan is made while another is in flight


NOTHING_PENDING = Pending()


class Loop(Protocol):
    """Calls that an attachment may make on the loop when it closes."""

    @property
    def executor(self) -> Executor: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def has_failed(self) -> bool: ...
    def now(self) -> float: ...
    def take(self) -> StepOutputs: ...
    def control(self, message: Control) -> None: ...
    def schedule(self) -> Decisions: ...
    def update(self, result: StepResult) -> Decisions: ...
    def wait_for_answers(self) -> None: ...
    def requests(self) -> tuple[RequestView, ...]: ...
    def prefixes(self) -> list[PinnedPrefix]: ...
    def held(self) -> list[RetainedRequest]: ...


class Attachment:
    """Base class of attachments. A method that is not overridden does nothing.

    order: the attachment with the lowest order is called first.
    is_vital: what happens if a method raises. True: the engine stops, because requests depend on
    the attachment. False: the attachment is detached, with a warning in the log.
    rests: number of times that the loop asks for a plan until the attachment is called again. The
    loop counts it down. Meanwhile it calls only `accept` and `close`, and ignores `pending`.
    pending: what the loop may wait for. Override it with a property, or keep the default."""

    order: int = 50
    is_vital: bool = True
    rests: int = 0
    pending: Any = NOTHING_PENDING  # Pending

    def accept(self, request: Request) -> Request:
        """Return the request that the scheduler is to get. Raise RequestError to refuse it."""
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        """Receive the scheduler's decisions about the input of a door. given: None after
        `schedule`. A request in `given` was refused if the decisions hold a refusal."""

    def answers(self, now: float) -> Sequence[Control]:
        """Return messages for the scheduler. The loop calls this in every turn."""
        return ()

    def before_plan(self, num_in_flight: int) -> Sequence[Control]:
        """Return messages that the scheduler is to get before it makes the next plan."""
        return ()

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        """Receive an event of a step in flight."""

    def close(self, loop: Loop) -> None:
        """Close the attachment. The only later call is `on_step`, for void steps."""


class Doors(Protocol):
    """Four doors of a scheduler."""

    def add(self, request: Request, now: float) -> Decisions: ...
    def control(self, message: Control, now: float) -> Decisions: ...
    def schedule(self, now: float) -> Decisions: ...
    def update(self, result: StepResult, now: float) -> Decisions: ...


class DoorWatcher(Attachment, Doors):
    """Attachment in front of the doors: each call goes through it, after all other attachments, and
    it passes the call on to the scheduler. At most one per core."""
