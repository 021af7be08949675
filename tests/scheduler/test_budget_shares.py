"""How the tokens of a step are shared: rows that decode, prompts, the head of the queue."""

import pytest

from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from tests.support.scheduler.plain_scheduler import add, scheduler_of, step


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_decoding_rows_come_before_prompts(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy, budget=8)
    add(scheduler, "first", 4)
    add(scheduler, "long", 40)
    assert step(scheduler) == {"first": 4, "long": 4}
    add(scheduler, "later", 2)
    for _ in range(3):
        assert step(scheduler)["first"] == 1


def test_a_step_computes_at_most_the_threshold_of_a_prompt() -> None:
    scheduler = scheduler_of(Fifo, budget=16, long_prefill_token_threshold=6)
    add(scheduler, "long", 40)
    add(scheduler, "other", 9)
    add(scheduler, "third", 9)
    assert step(scheduler) == {"long": 6, "other": 6, "third": 4}


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_a_head_that_does_not_fit_stops_nobody(policy: MakePolicy) -> None:
    """A prompt under way goes on, preempting if it must, while a shorter one waits for memory."""
    scheduler = scheduler_of(policy, blocks=32, max_num_seqs=3)
    add(scheduler, "a", 60)
    add(scheduler, "b", 50)
    add(scheduler, "c", 40)
    for _ in range(400):
        if not scheduler.lifecycle.sequences:
            break
        assert step(scheduler), "nobody goes on"
    assert not scheduler.lifecycle.sequences


def test_a_heavy_tenants_long_prompt_under_way_is_deferred() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "heavy", 100, tenant="heavy")
    step(scheduler)
    add(scheduler, "light", 12, tenant="light")
    assert step(scheduler) == {"light": 12, "heavy": 4}


def test_a_prompt_under_way_goes_before_a_new_one_of_the_same_rank() -> None:
    scheduler = scheduler_of(Srtf, budget=8)
    add(scheduler, "first", 20)
    assert step(scheduler) == {"first": 8}
    add(scheduler, "as short", 12)
    assert step(scheduler) == {"first": 8}
