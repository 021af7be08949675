"""The attachments of one loop, in order: who is called when, and what a failure of one means."""

import logging

from quire.base.errors import RequestError
from quire.base.messages import Control, Request
from quire.engine.loop.attachment import Attachment, Given, Loop, Pending, Phase
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.decisions import Decisions

logger = logging.getLogger("quire")


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
        for each in self._hear:
            try:
                each.hear(given, decisions)
            except Exception as error:
                self._fail(each, error)

    def answers(self, now: float) -> list[Control]:
        found: list[Control] = []
        for each in self._answers:
            try:
                found += each.answers(now)
            except Exception as error:
                self._fail(each, error)
        return found

    def before_plan(self, num_in_flight: int) -> list[Control]:
        found: list[Control] = []
        for each in self._before_plan:
            try:
                found += each.before_plan(num_in_flight)
            except Exception as error:
                self._fail(each, error)
        return found

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        for each in self._on_step:
            try:
                each.on_step(step, phase)
            except Exception as error:
                self._fail(each, error)

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
