"""What the scheduler lets sequences try: what budget, blocks and length leave, and nothing that is
out of date."""

import numpy as np

from quire.base.cache_group import CacheGroup
from quire.base.config import SchedulerConfig
from quire.base.messages import Draft, Drafted
from quire.base.plan import Plan, StepResult
from quire.kv.manager import KVManager
from quire.scheduler.fifo import Fifo
from quire.scheduler.memory import Memory
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_policies import add, scheduler_of, step


def guess(scheduler: Scheduler, name: str, num: int, known: int | None = None) -> None:
    sequence = scheduler.lifecycle.sequences[name]
    known = sequence.num_known_tokens if known is None else known
    scheduler.control(Drafted([Draft(name, 0, known, [1] * num)]), 0.0)


def plan_of(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    return plan


def tried(plan: Plan) -> dict[int, int]:
    return {draft.row: len(draft.token_ids) for draft in plan.drafts}


def running(budget: int = 64, length: int = 6, max_tokens: int = 50) -> Scheduler:
    """`a` runs and lacks its next token."""
    scheduler = scheduler_of(Fifo, budget=budget)
    add(scheduler, "a", length, max_tokens=max_tokens)
    while scheduler.lifecycle.sequences["a"].num_output_tokens < 1:
        step(scheduler)
    return scheduler


def test_a_guess_is_tried_once() -> None:
    scheduler = running()
    guess(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert tried(plan) == {0: 3} and plan.num_tokens.tolist() == [4]
    assert plan.num_drafts.tolist() == [3]
    scheduler.update(StepResult(plan.step_id, np.array([[9]]), np.array([1])), 0.0)
    assert tried(plan_of(scheduler)) == {}


def test_a_guess_about_other_tokens_is_forgotten() -> None:
    scheduler = running()
    guess(scheduler, "a", 3, known=5)
    assert tried(plan_of(scheduler)) == {}
    assert not scheduler.drafts.has_any


def test_prompts_come_first() -> None:
    scheduler = running(budget=8)
    add(scheduler, "b", 5)
    guess(scheduler, "a", 6)
    plan = plan_of(scheduler)
    assert sorted(plan.num_tokens.tolist()) == [3, 5], "a token and what five leave of eight"
    assert tried(plan) == {0: 2}


def test_nobody_gives_way_for_a_guess() -> None:
    """Without a block to spare it tries what its own blocks hold."""
    scheduler = running(length=13)
    size = scheduler.memory.block_size
    held = scheduler.memory.kv.pools[0]
    while held.num_free:
        held.allocate()
    guess(scheduler, "a", 12)
    known = scheduler.lifecycle.sequences["a"].num_known_tokens
    assert tried(plan_of(scheduler)) == {0: -(-known // size) * size - known}


def test_a_guess_never_passes_the_limit() -> None:
    scheduler = running(max_tokens=5)
    guess(scheduler, "a", 20)
    assert tried(plan_of(scheduler)) == {0: 3}, "one token is there, the last one is sampled"


def test_blocks_of_wrong_guesses_are_free_again() -> None:
    scheduler = running(length=6)
    pool = scheduler.memory.kv.pools[0]
    guess(scheduler, "a", 3)
    before = pool.num_used
    plan = plan_of(scheduler)
    scheduler.update(StepResult(plan.step_id, np.array([[9]]), np.array([1])), 0.0)
    scheduler.check_invariants()
    assert pool.num_used <= before + 1


def test_no_guess_behind_a_pending_token() -> None:
    scheduler = running()
    plan_of(scheduler)
    assert scheduler.drafts.candidates() == []
    guess(scheduler, "a", 3)
    scheduler.depth = 2
    plan = scheduler.schedule(0.0).plan
    assert plan is None or tried(plan) == {}


def test_what_a_guess_evicts_is_copied_out_before_it_is_written() -> None:
    """The plan that gives a cached block to guesses is the one that copies it to host memory."""
    kv = KVManager((CacheGroup("full", (0,), 1, 1),), (4,), 4, host_limits=[8])
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = Scheduler(Memory(kv, 16, watermark=0.0), config, 16, Fifo)
    add(scheduler, "old", 8, max_tokens=1)
    while scheduler.has_work:
        step(scheduler)
    cached = [block for block in range(4) if kv.pools[0].is_indexed(block)]
    assert len(cached) == 2
    add(scheduler, "a", 3, max_tokens=10)
    while scheduler.lifecycle.sequences["a"].num_output_tokens < 1:
        step(scheduler)
    guess(scheduler, "a", 8)
    plan = plan_of(scheduler)
    assert tried(plan) == {0: 8}
    given = {block for block in plan.block_writes.block_id.tolist() if block in cached}
    copied = {block for move in plan.moves for block in move.source.tolist()}
    assert given and given <= copied
