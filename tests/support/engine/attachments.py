"""Attachments of a core, for tests that look at them or put others in their place."""

from typing import Any, TypeVar

from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.engine.attachments.drafting import DraftingAttachment
from quire.engine.attachments.on_demand import OnDemand
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.drafting.drafting import Int64
from quire.engine.loop.attachment import Attachment
from quire.engine.loop.core import EngineCore
from quire.scheduler.core.sequence import RowTable, Sequence

AnAttachment = TypeVar("AnAttachment", bound=Attachment)


def attached(core: EngineCore, kind: type[AnAttachment]) -> AnAttachment | None:
    """The attachment of a kind, also if no request has needed it yet."""
    every = [*core.attachments.all, *(each for found in on_demand(core) for each in found.others)]
    return next((each for each in every if isinstance(each, kind)), None)


def on_demand(core: EngineCore) -> list[OnDemand]:
    """What attaches others once a request needs them."""
    return [each for each in core.attachments.all if isinstance(each, OnDemand)]


def drafter_of(core: EngineCore) -> Any:
    """What drafts for a core; None if nothing does."""
    found = attached(core, DraftingAttachment)
    return None if found is None else found.drafter


def draft_with(core: EngineCore, drafter: Any) -> None:
    """Let this draft in the place of what did; None: nothing."""
    if (before := attached(core, DraftingAttachment)) is not None:
        core.detach(before)
        for found in on_demand(core):
            found.others = [each for each in found.others if each is not before]
    if drafter is not None:
        core.attach(DraftingAttachment(drafter, core.scheduler, core.limits))


def stores_of(core: EngineCore) -> Any:
    """What carries out the orders for a core's stores."""
    found = attached(core, StoresAttachment)
    assert found is not None, "the core has no stores"
    return found.stores


class StandIn:
    """Guesses nothing. num_tried: guesses that plans have tried."""

    holds_back = drafts_on_device = decides_wait = False
    num_idle = num_tried = 0
    may_skip = True

    def draftable(self, table: RowTable, rows: Int64) -> Int64:
        return rows

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        return []

    def follow(self) -> None:
        pass

    def decide_wait(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        pass

    def planned(self, plan: Plan) -> None:
        self.num_tried += int(plan.num_drafts.sum())

    def skip_plans(self, num: int) -> None:
        pass

    def observe(self, plan: Plan, result: StepResult) -> None:
        pass
