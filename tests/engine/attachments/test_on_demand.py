"""Attachments that only some requests need."""

from quire.engine.attachments.on_demand import OnDemand
from tests.engine.loop.test_attachment import make_core
from tests.support.engine.fake_attachment import FakeAttachment
from tests.support.scheduler.fake_device import make_request


def test_no_step_calls_them_before_the_first_request_that_needs_them() -> None:
    core, others = make_core(), [FakeAttachment("first"), FakeAttachment("second")]
    demand = OnDemand(core, ("priority",), others)
    core.attach(demand)
    core.add(make_request("plain", [1, 2, 3], max_tokens=2))
    core.step()
    assert not others[0].calls and core.attachments.all == [demand]
    core.add(make_request("other", [1, 2, 3], priority=1))
    assert core.attachments.all == others
    for each in others:
        assert each.calls[0] == f"{each.name}: hear Request", "it hears of that request"
    core.step()
    core.close()
    assert all(each.calls[-1] == f"{each.name}: close" for each in others)


def test_they_are_closed_if_no_request_has_needed_them() -> None:
    core, other = make_core(), FakeAttachment()
    core.attach(OnDemand(core, ("priority",), [other]))
    core.add(make_request("plain", [1, 2, 3]))
    core.close()
    assert other.calls == ["fake: close"]
