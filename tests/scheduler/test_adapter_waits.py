"""Requests are parked until their adapter is ready, and others continue."""

import msgspec

from quire.base.events import Finished
from quire.base.messages import Abort, AdapterReady, GrammarReady, Request
from quire.base.requests.sampling_params import SamplingParams
from quire.scheduler.core.queue import Fifo
from tests.support.scheduler.plain_scheduler import answer, scheduler_of

PLAIN = Request("plain", [1, 2, 3], SamplingParams(max_tokens=4), 0)
ADAPTED = msgspec.structs.replace(
    PLAIN, request_id="adapted", adapter_id="x", adapter_path="/x", awaits_adapter=True
)


def test_a_request_waits_for_its_adapter() -> None:
    scheduler = scheduler_of(Fifo)
    for request in (ADAPTED, PLAIN):
        scheduler.add(request, 0.0)
    plan = scheduler.schedule(1.0).plan
    assert plan is not None and [start.adapter_id for start in plan.started] == [""]
    scheduler.update(answer(plan), 2.0)
    scheduler.control(AdapterReady("unknown"), 2.0)
    scheduler.control(AdapterReady("plain", "not its own"), 2.0)
    scheduler.control(AdapterReady("adapted"), 2.0)
    scheduler.control(AdapterReady("adapted", "too late"), 2.0)
    plan = scheduler.schedule(3.0).plan
    assert plan is not None and [start.adapter_id for start in plan.started] == ["x"]
    scheduler.check_invariants()


def test_a_request_with_a_grammar_waits_for_its_adapter_and_its_grammar() -> None:
    for first, second in ((AdapterReady, GrammarReady), (GrammarReady, AdapterReady)):
        scheduler = scheduler_of(Fifo)
        scheduler.add(msgspec.structs.replace(ADAPTED, grammar="start: /a/"), 0.0)
        scheduler.control(first("adapted"), 1.0)
        assert scheduler.schedule(2.0).plan is None
        scheduler.control(second("adapted"), 3.0)
        assert scheduler.schedule(4.0).plan is not None


def test_an_adapter_error_ends_the_request() -> None:
    scheduler = scheduler_of(Fifo)
    scheduler.add(ADAPTED, 0.0)
    decisions = scheduler.control(AdapterReady("adapted", "bad files"), 1.0)
    [event] = decisions.events
    assert isinstance(event, Finished) and event.reason == "error"
    [(_, finish)] = scheduler.schedule(2.0).outputs.finished
    assert finish.error is not None and finish.error.message == "bad files"
    assert not scheduler.has("adapted")


def test_a_request_may_be_aborted_while_it_waits_for_its_adapter() -> None:
    scheduler = scheduler_of(Fifo)
    scheduler.add(ADAPTED, 0.0)
    scheduler.control(Abort("adapted"), 1.0)
    scheduler.control(AdapterReady("adapted"), 2.0)
    assert scheduler.schedule(3.0).plan is None
    scheduler.check_invariants()
