"""What events tell of a request that comes in, and of one that gives way."""

from collections.abc import Iterator

import msgspec
import pytest

from quire.base.events import Preempted, Queued
from quire.scheduler.sequence import Sequence
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


class Unwalked(dict[str, Sequence]):
    """Requests that may be looked up but not walked."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all requests are walked")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_a_view_walks_no_requests() -> None:
    """Metrics and the status line ask for it between two steps."""
    scheduler = scheduler_of()
    for number in range(3):
        scheduler.add(make_request(f"r{number}", [1, 2, 3], max_tokens=2, seed=number), 0.0)
    assert [found.request.request_id for found in scheduler.requests()] == ["r0", "r1", "r2"]
    scheduler.lifecycle.sequences = Unwalked(scheduler.lifecycle.sequences)
    assert scheduler.view().num_waiting == 3
    with pytest.raises(AssertionError, match="walked"):
        scheduler.requests()
