"""Groups of sequences, before they fork and when they lose their rows."""

import pytest

from quire.base.messages import Abort
from tests.scheduler.device import make_request
from tests.scheduler.test_admission import others, scheduler_of


@pytest.mark.parametrize("back", [False, True])
def test_a_group_that_lost_its_rows_before_it_forked_gives_them_back_once(back: bool) -> None:
    scheduler = scheduler_of(100, num_rows=6, pipeline_depth=1, long_prefill_token_threshold=4)
    prompt = list(range(2, 22))
    scheduler.add(make_request("three", prompt, max_tokens=5, n=3), 0.0)
    for _ in range(2):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
    group = scheduler.lifecycle.sequences["three"].group
    assert (
        group is not None
        and scheduler.num_free_rows == 3
        and len(scheduler.lifecycle.unforked) == 1
    )
    scheduler.lifecycle.preempt(group.members[0], "test", 0.0)
    assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (6, 0)
    if back:
        assert scheduler.schedule(0.0).plan is not None
        assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (3, 1)
    scheduler.control(Abort("three"), 0.0)
    assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (6, 0)
    assert sorted(scheduler.rows.free) == list(range(6))
    scheduler.check_invariants()
