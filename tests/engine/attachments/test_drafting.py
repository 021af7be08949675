"""When the attachment skips its drafter. Covers `engine/attachments/drafting.py`."""

from dataclasses import replace

import pytest

from quire.base.plan import Plan, StepResult
from quire.engine.attachments.drafting import FULL_PLANS, DraftingAttachment
from quire.engine.loop.core import EngineCore
from tests.engine.loop.test_attachment import ask, make_core
from tests.support.engine.attachments import StandIn


class Sleeper(StandIn):
    """A drafter that is idle for as many plans as a test sets. calls: the methods that were called.
    num_plans: the plans that it was called for or that it skipped."""

    def __init__(self) -> None:
        self.num_idle = self.num_plans = 0
        self.calls: list[str] = []

    def planned(self, plan: Plan) -> None:
        self.num_plans += 1
        self.calls.append("planned")

    def skip_plans(self, num: int) -> None:
        self.num_plans += num

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.calls.append("observed")


def core_with(drafter: Sleeper, depth: int = 1) -> EngineCore:
    core = make_core(depth=depth)
    core.attach(DraftingAttachment(drafter, core.scheduler, core.limits))
    return core


def test_idle_drafter_is_not_called_for_num_idle_plans() -> None:
    drafter = Sleeper()
    core = core_with(drafter)
    ask(core, num_tokens=9)
    seen = ["planned", "observed"]
    core.step()
    drafter.num_idle = 3
    core.step()
    drafter.num_idle = 0  # read only after the skipped plans
    core.step()
    core.step()
    assert (drafter.calls, drafter.num_plans) == (seen, 4)
    core.step()
    assert (drafter.calls, drafter.num_plans) == (seen * 2, 5)


@pytest.mark.parametrize("num_before", [1, 2])
def test_request_with_a_grammar_ends_the_idle_period(num_before: int) -> None:
    drafter = Sleeper()
    core = core_with(drafter)
    core.limits = replace(core.limits, takes_grammars=True)
    ask(core, num_tokens=9)
    drafter.num_idle = 1000
    for _ in range(num_before):
        core.step()
    drafter.num_idle = 0
    ask(core, "b", num_tokens=9, grammar="root ::= 'a'")
    assert (drafter.calls, drafter.num_plans) == ([], num_before)
    core.step()
    assert (drafter.calls, drafter.num_plans) == (["planned", "observed"], num_before + 1)


def test_plans_in_flight_are_observed_before_the_idle_period() -> None:
    """Their results show how many draft tokens were accepted."""
    drafter = Sleeper()
    core = core_with(drafter, depth=2)
    ask(core, num_tokens=8)
    core.plan()
    drafter.num_idle = 2
    core.plan()
    core.take()
    core.take()
    assert drafter.calls == ["planned", "planned", "observed", "observed"]
    core.plan()
    core.take()
    assert drafter.calls[4:] == []


def test_idle_drafter_holds_no_plans_back() -> None:
    """Even if the next plan had to wait for the draft tokens of the last step."""
    drafter = Sleeper()
    core = core_with(drafter, depth=2)
    ask(core, num_tokens=8)
    drafter.holds_back, drafter.num_idle = True, 1000
    core.plan()
    assert not core.attachments.holds_plans
    core.plan()
    assert core.num_in_flight == 2


def test_drafter_that_may_not_skip_gets_plans_without_room() -> None:
    drafter = Sleeper()
    drafter.may_skip = False
    core = core_with(drafter)
    core.scheduler.token_budget = 1
    ask(core, num_tokens=9)
    for _ in range(3):
        core.step()
    assert drafter.calls == ["planned", "observed"] * 3


def test_drafter_is_skipped_while_plans_have_no_room() -> None:
    drafter = Sleeper()
    core = core_with(drafter)
    core.scheduler.token_budget = 2
    ask(core, "a", num_tokens=30)
    core.step()
    assert drafter.num_plans == 1 and drafter.calls
    ask(core, "b", num_tokens=30)
    core.step()  # "b" joins this plan
    drafter.calls.clear()
    for _ in range(FULL_PLANS):
        core.step()
    assert (drafter.calls, drafter.num_plans) == ([], 2 + FULL_PLANS)
