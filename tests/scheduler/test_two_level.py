"""Two-level scheduling: batches, and no starvation of long prompts."""

import pytest

from quire.scheduler.policy import two_level
from quire.scheduler.policy.two_level import TwoLevel
from tests.scheduler.test_policies import firsts
from tests.support.scheduler.plain_scheduler import add, scheduler_of, step


def test_a_batch_is_served_before_the_next_batch_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "PATIENCE", 1000.0)
    scheduler = scheduler_of(TwoLevel, budget=20)
    for i in range(12):
        add(scheduler, f"r{i}", 20 - i)
    order = firsts(scheduler)
    batch, rest = [f"r{i}" for i in range(8)], [f"r{i}" for i in range(8, 12)]
    assert order == batch[::-1] + rest[::-1]


def test_long_prompts_that_wait_for_each_other_do_not_hold_up_the_next_batch() -> None:
    scheduler = scheduler_of(TwoLevel)
    for i in range(two_level.STAGING + 3):
        add(scheduler, f"long {i}", 60)
    step(scheduler)
    step(scheduler)
    add(scheduler, "short", 4)
    assert "short" in step(scheduler)


@pytest.mark.parametrize(("patience", "is_in_time"), [(1.8, True), (1000.0, False)])
def test_short_requests_cannot_starve_a_long_one(
    monkeypatch: pytest.MonkeyPatch, patience: float, is_in_time: bool
) -> None:
    """It may take at most twice the steps that it would take in order of arrival."""
    monkeypatch.setattr(two_level, "PATIENCE", patience)
    scheduler = scheduler_of(TwoLevel)
    add(scheduler, "long", 160)
    num_steps = 0
    while (
        scheduler.rows.sequences()[-1:] == []
        or scheduler.lifecycle.sequences["long"].num_output_tokens == 0
    ):
        add(scheduler, f"short {num_steps}", 12, max_tokens=1)
        step(scheduler)
        num_steps += 1
        if num_steps == 100:
            break
    assert (num_steps <= 2 * 160 / 16) == is_in_time
