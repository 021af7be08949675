"""What events tell of a request that comes in, and of one that gives way."""

import sys

import msgspec

from quire.base.events import Preempted, Queued
from tests.scheduler.device import make_request
from tests.scheduler.test_step_results import scheduler_of, step


def test_what_is_told_of_one_that_comes_in() -> None:
    scheduler = scheduler_of()
    request = make_request("r", [1, 2, 3], max_tokens=5, tenant="mine")
    request = msgspec.structs.replace(request, received_s=0.5)
    assert scheduler.add(request, 2.0).events == [Queued(2.0, "r", 3, 5, 0.5, "mine")]


def test_what_is_told_of_one_that_gives_way() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(9)), max_tokens=9), 0.0)
    step(scheduler, 5)
    step(scheduler, 5)
    rows = scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["r"], "other", 3.0)
    assert rows == {0}
    assert scheduler.lifecycle.events[-1] == Preempted(3.0, "r", "other", 10, False)


def test_a_view_costs_the_same_however_many_wait() -> None:
    """Metrics and the status line ask for it between two steps."""
    scheduler, num_calls = scheduler_of(), []
    for num in (1, 50):
        for _ in range(num):
            number = len(scheduler.requests())
            scheduler.add(make_request(f"r{number}", [1, 2, 3], max_tokens=2, seed=number), 0.0)
        calls: list[str] = []
        sys.setprofile(lambda frame, event, arg: calls.append(event))  # noqa: B023
        scheduler.view()
        sys.setprofile(None)
        num_calls.append(len(calls))
    assert num_calls[0] == num_calls[1]
    assert [found.request.request_id for found in scheduler.requests()][:2] == ["r0", "r1"]
