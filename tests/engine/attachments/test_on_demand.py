"""Attachments that only some requests need."""

from quire.engine.attachments.on_demand import OnDemand
from tests.engine.loop.test_attachment import make_core
from tests.support.engine.fake_attachment import FakeAttachment
from tests.support.scheduler.fake_device import make_request


def test_attachments_stay_idle_until_a_request_needs_them() -> None:
    core, fakes = make_core(), [FakeAttachment("first"), FakeAttachment("second")]
    demand = OnDemand(core, ("priority",), fakes)
    core.attach(demand)
    core.add(make_request("plain", [1, 2, 3], max_tokens=2))
    core.step()
    assert not fakes[0].calls and core.attachments.all == [demand]
    core.add(make_request("other", [1, 2, 3], priority=1))
    assert core.attachments.all == fakes
    for each in fakes:
        assert each.calls[0] == f"{each.name}: hear Request", "it gets the request that needs it"
    core.step()
    core.close()
    assert all(each.calls[-1] == f"{each.name}: close" for each in fakes)


def test_attachments_that_no_request_needed_are_closed() -> None:
    core, other = make_core(), FakeAttachment()
    core.attach(OnDemand(core, ("priority",), [other]))
    core.add(make_request("plain", [1, 2, 3]))
    core.close()
    assert other.calls == ["fake: close"]
