"""An attachment for tests: it notes every call and returns the results that a test sets."""

from collections.abc import Sequence

from quire.base.messages import Control, Request
from quire.base.plan import StepResult
from quire.engine.loop.attachment import NOTHING_PENDING, Attachment, Given, Loop, Phase
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.decisions import Decisions


class FakeAttachment(Attachment):
    """calls: what was called, as text. raises_in: the method that raises. next_answers,
    next_messages: what `answers` and `before_plan` return once."""

    def __init__(
        self,
        name: str = "fake",
        order: int = Attachment.order,
        calls: list[str] | None = None,
        is_vital: bool = True,
        raises_in: str = "",
    ) -> None:
        self.name, self.order, self.is_vital, self.raises_in = name, order, is_vital, raises_in
        self.calls: list[str] = [] if calls is None else calls
        self.next_answers: list[Control] = []
        self.next_messages: list[Control] = []
        self.is_pending = NOTHING_PENDING

    @property
    def pending(self):  # type: ignore[no-untyped-def,override]
        return self.is_pending

    def accept(self, request: Request) -> Request:
        self._note("accept", request.request_id)
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        kind = "plan" if given is None else type(given).__name__
        self._note("hear", kind)
        assert (kind == "plan") or decisions.plan is None
        assert isinstance(given, StepResult) or not decisions.omitted

    def answers(self, now: float) -> Sequence[Control]:
        self._note("answers")
        answers, self.next_answers = self.next_answers, []
        return answers

    def before_plan(self, num_in_flight: int) -> Sequence[Control]:
        self._note("before_plan", str(num_in_flight))
        messages, self.next_messages = self.next_messages, []
        return messages

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        self._note("on_step", f"{phase.value} {step.plan.step_id}")
        assert (step.result is not None) == (phase is Phase.DONE)

    def close(self, loop: Loop) -> None:
        self._note("close")

    def _note(self, method: str, what: str = "") -> None:
        self.calls.append(f"{self.name}: {method} {what}".strip())
        if method == self.raises_in:
            raise ValueError(f"{self.name} was made to fail")
