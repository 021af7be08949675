"""The attachment of drafters: when it rests. Covers `engine/attachments/drafting.py`."""

from quire.base.plan import Plan, StepResult
from quire.engine.attachments.drafting import DraftingAttachment
from tests.engine.loop.test_attachment import ask, make_core
from tests.support.engine.attachments import StandIn


class Sleeper(StandIn):
    """A drafter that is idle when a test says so. calls: what was called."""

    def __init__(self) -> None:
        self.is_idle = False
        self.calls: list[str] = []

    def planned(self, plan: Plan) -> None:
        self.calls.append("planned")

    def skip_plan(self) -> None:
        self.calls.append("skipped")

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.calls.append("observed")


def test_an_idle_drafter_is_not_called_again_until_it_wakes() -> None:
    drafter, core = Sleeper(), make_core()
    core.attach(DraftingAttachment(drafter, core.scheduler, core.limits))
    ask(core, num_tokens=8)
    for is_idle in (False, True, True, False):
        drafter.is_idle = is_idle
        core.step()
    seen = ["planned", "observed"]
    assert drafter.calls == [*seen, "skipped", "skipped", *seen]


def test_plans_in_flight_are_observed_before_the_rest() -> None:
    """Their results show how many draft tokens were accepted."""
    drafter, core = Sleeper(), make_core(depth=2)
    core.attach(DraftingAttachment(drafter, core.scheduler, core.limits))
    ask(core, num_tokens=8)
    core.plan()
    drafter.is_idle = True
    core.plan()
    core.take()
    core.take()
    assert drafter.calls == ["planned", "planned", "observed", "observed"]
    core.plan()
    core.take()
    assert drafter.calls[4:] == ["skipped"]
