"""How the tokens of a step are shared by decoding rows, prompts and the head of the queue."""

import numpy as np
import pytest

from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.sharing import share_budget
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


def test_a_decoding_row_comes_before_a_prompt_of_a_higher_priority() -> None:
    scheduler = scheduler_of(Fifo, budget=8)
    add(scheduler, "low", 4, priority=1)
    assert step(scheduler) == {"low": 4}
    add(scheduler, "high", 40)
    for _ in range(3):
        assert step(scheduler) == {"low": 1, "high": 7}


def test_a_step_computes_at_most_the_threshold_of_a_prompt() -> None:
    scheduler = scheduler_of(Fifo, budget=16, long_prefill_token_threshold=6)
    add(scheduler, "long", 40)
    add(scheduler, "other", 9)
    add(scheduler, "third", 9)
    assert step(scheduler) == {"long": 6, "other": 6, "third": 4}


def test_running_prompts_share_the_budget_of_a_step() -> None:
    scheduler = scheduler_of(Fifo, budget=16, long_prefill_token_threshold=6)
    for name in ("a", "b", "c"):
        add(scheduler, name, 40)
    assert step(scheduler) == step(scheduler) == {"a": 6, "b": 6, "c": 4}


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_a_queue_head_that_does_not_fit_blocks_no_other_request(policy: MakePolicy) -> None:
    """A started prompt continues, with preemptions if needed, while a shorter one waits."""
    scheduler = scheduler_of(policy, blocks=32, max_num_seqs=3)
    add(scheduler, "a", 60)
    add(scheduler, "b", 50)
    add(scheduler, "c", 40)
    for _ in range(400):
        if not scheduler.lifecycle.sequences:
            break
        assert step(scheduler), "no request makes progress"
    assert not scheduler.lifecycle.sequences


def test_a_started_long_prompt_of_a_heavy_tenant_is_deferred() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "heavy", 100, tenant="heavy")
    step(scheduler)
    add(scheduler, "light", 12, tenant="light")
    assert step(scheduler) == {"light": 12, "heavy": 4}


def test_a_deferred_prompt_without_a_free_block_fills_its_own_slots() -> None:
    scheduler = scheduler_of(Fifo, budget=18)
    add(scheduler, "long", 40)
    step(scheduler)
    pool, prompt = scheduler.memory.kv.pools[0], scheduler.lifecycle.sequences["long"]
    while pool.num_free:
        pool.allocate()
    for num_granted in (2, 0):
        builder = PlanBuilder(9)
        assert scheduler.admission._continue_deferred(prompt, builder, 8) == num_granted
        assert len(builder.all_rows()[0]) == (num_granted > 0)


def test_a_started_prompt_comes_before_a_new_one_of_the_same_rank() -> None:
    scheduler = scheduler_of(Srtf, budget=8)
    add(scheduler, "first", 20)
    assert step(scheduler) == {"first": 8}
    add(scheduler, "as short", 12)
    assert step(scheduler) == {"first": 8}


@pytest.mark.parametrize(("need", "budget"), [(1, 8), (40, 8), (5, 8), (40, 0)])
def test_a_single_row_is_not_ranked(need: int, budget: int) -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "alone", 40)
    step(scheduler)
    queue, rows = scheduler.lifecycle.queue, scheduler.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "rank", pytest.fail)
        granted, deferred = share_budget(
            rows, queue, rows.running, np.array([need]), budget, lambda head: True
        )
    assert granted.tolist() == [min(need, budget)] and not deferred
