"""Drafting as an attachment: it sends draft tokens to the scheduler before plans that may verify
them."""

from collections.abc import Sequence

from quire.base.messages import Control, Draft, Drafted, Request
from quire.base.plan import StepResult
from quire.base.requests.validation import RequestLimits
from quire.engine.attachments.order import Order
from quire.engine.drafting.drafting import Drafter
from quire.engine.loop.attachment import NOTHING_PENDING, Attachment, Given, Pending, Phase
from quire.engine.loop.in_flight import StepInFlight
from quire.scheduler.core import sequence
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler

HOLDS_PLANS = Pending(holds_plans=True)
FULL_PLANS = 8  # length of a rest while the running rows take the whole token budget


class DraftingAttachment(Attachment):
    """Attachment that lets a drafter propose tokens.

    A drafter on the host needs the last token, so it drafts while no plan is in flight. It decides
    whether the next plan should wait for that. A drafter on the device drafts for each plan. While
    the drafter is idle or plans have no room for drafts, the attachment rests. It first waits for
    the results of plans in flight."""

    order = Order.DRAFTING

    def __init__(self, drafter: Drafter, scheduler: Scheduler, limits: RequestLimits) -> None:
        self.drafter = drafter
        drafter.max_tokens = scheduler.token_budget
        self._scheduler = scheduler
        self._limits = limits
        self._num_in_flight = 0

    @property
    def pending(self) -> Pending:
        return HOLDS_PLANS if self.drafter.holds_back else NOTHING_PENDING

    def before_plan(self, num_in_flight: int) -> Sequence[Control]:
        drafter, self._num_in_flight = self.drafter, num_in_flight
        num_idle, num_running = drafter.num_idle, self._scheduler.num_running
        if drafter.may_skip and num_in_flight == 0 and num_running >= self._scheduler.token_budget:
            num_idle = num_idle or FULL_PLANS
        if num_idle:
            if num_in_flight == 0:
                self.rests = num_idle
                drafter.skip_plans(num_idle)
            return ()
        if num_in_flight >= self._scheduler.depth:
            return ()
        drafts_on_device = drafter.drafts_on_device
        if num_in_flight:
            drafter.follow()
            if not drafts_on_device:
                return ()
        found = self._candidates(None if drafts_on_device else 0)
        drafts = drafter.propose(found, num_running)
        if not drafts:
            return ()
        return [
            Drafted(drafts if drafts_on_device else self._known(drafts), on_device=drafts_on_device)
        ]

    def accept(self, request: Request) -> Request:
        if request.grammar and self.rests:  # the grammar may force tokens
            self.drafter.skip_plans(1 - self.rests)
            self.rests = 0
        return request

    def hear(self, given: Given, decisions: Decisions) -> None:
        if decisions.plan is not None:
            self._num_in_flight += 1
            self.drafter.planned(decisions.plan)
        elif type(given) is StepResult:
            self._num_in_flight -= 1
            self._decide_wait()

    def on_step(self, step: StepInFlight, phase: Phase) -> None:
        if phase is Phase.DONE and step.result is not None:
            self.drafter.observe(step.carried_out, step.result)

    def _decide_wait(self) -> None:
        """Let the drafter decide whether the next plan waits until no plan is in flight."""
        drafter, num = self.drafter, self._num_in_flight
        if num > 0 and drafter.decides_wait and not drafter.num_idle:
            drafter.decide_wait(self._candidates(num), num, self._scheduler.num_running)

    def _candidates(self, num_pending: int | None) -> list[sequence.Sequence]:
        return self._scheduler.drafts.candidates(self.drafter.draftable, num_pending)

    def _known(self, drafts: list[Draft]) -> list[Draft]:
        """Cut drafts before the first token that is not in the vocabulary."""
        return [self._limits.known_part(draft) for draft in drafts]
