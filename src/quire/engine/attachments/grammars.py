"""Grammars as an attachment: compiles them when requests arrive, and makes masks before each
step."""

from collections.abc import Sequence

from quire.base.messages import Control, Request
from quire.engine.attachments.order import Order
from quire.engine.grammars.grammars import Grammars
from quire.engine.loop.attachment import Attachment, Given, Loop, Pending, Phase
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.decisions import Decisions


class GrammarAttachment(Attachment):
    """Attachment that compiles the grammars of requests. It makes the masks of a step once all
    results before it are known."""

    order = Order.GRAMMARS

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars

    @property
    def pending(self) -> Pending:
        return Pending(self.grammars.has_answers, self.grammars.num_open)

    def hear(self, given: Given, decisions: Decisions) -> None:
        if decisions.events:
            self.grammars.hear(decisions.events)
        if type(given) is Request and given.grammar and decisions.refusal is None:
            self.grammars.begin(given)

    def answers(self, now: float) -> Sequence[Control]:
        return self.grammars.take() if self.grammars.has_answers else ()

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        if step.masks is None:
            return
        if phase is Phase.NEXT:
            sequences = dict(zip(step.plan.sample_rows.tolist(), step.sampling, strict=True))
            self.grammars.fill(step.masks, step.carried_out, sequences)
        elif phase is Phase.VOID:
            self.grammars.forgo(step.masks, step.carried_out)

    def close(self, loop: Loop) -> None:
        self.grammars.close()
