"""Admission and preemption: watermark, headroom after preemptions, priorities."""

import numpy as np
import pytest

from benchmarks.virtual.branching import BranchingExecutor, group_request
from benchmarks.virtual.dry_run import dry_run
from quire.base.events import Preempted, PrefixFound
from quire.base.messages import Abort
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.scheduler.core import admission, memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.scheduler import Scheduler
from quire.tools.simulate.arrivals import OTHER, STOP, Arrival, simulated_request
from quire.tools.simulate.run import simulate
from quire.tools.step_times import Roofline
from quire.tools.workloads import Lengths, Workload
from tests.support.cases import slow_but
from tests.support.scheduler.events import listen
from tests.support.scheduler.fake_device import make_request

BLOCK = 4
SHORT = Workload("short", Lengths(9, 0.8, 1, 30), Lengths(20, 0.9, 1, 60))
A_SECOND = Roofline(1.0, 0.0)


def scheduler_of(num_blocks: int, num_rows: int = 64, **settings: object) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=64,
        **settings,  # type: ignore[arg-type]
    )
    return dry_run(num_blocks, BLOCK, config, 128, enable_prefix_caching=False)[0]


def backlog(num: int, seed: int) -> list[Arrival]:
    """Return requests that all arrive at the beginning."""
    inputs, outputs = SHORT.sample(num, seed)
    return [
        Arrival(0.0, simulated_request(str(i), list(range(2, 2 + n)), 60), m)
        for i, (n, m) in enumerate(zip(inputs.tolist(), outputs.tolist(), strict=True))
    ]


def add(scheduler: Scheduler, name: str, num_tokens: int, priority: int = 0) -> None:
    prompt = list(range(STOP + 1, STOP + 1 + num_tokens))
    scheduler.add(
        make_request(name, prompt, max_tokens=60, temperature=0.0, priority=priority), 0.0
    )


def others(plan: Plan) -> StepResult:
    """Return a result that gives each row a token which ends no sequence."""
    num = len(plan.sample_rows)
    return StepResult(plan.step_id, np.full((num, 1), OTHER, np.int32), np.ones(num, np.int32))


def running(scheduler: Scheduler) -> list[str]:
    return [sequence.request.request_id for sequence in scheduler.rows.sequences()]


@pytest.mark.parametrize("mode", slow_but(("recompute", "swap"), "recompute"))
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_no_request_is_preempted_more_than_three_times(
    monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    """Here admission never slows down. Without the rule, some are preempted more often."""
    monkeypatch.setattr(memory, "STEP_UP", 0.0)
    max_counts = []
    for limit in (admission.MAX_PREEMPTIONS, 1000):
        monkeypatch.setattr(admission, "MAX_PREEMPTIONS", limit)
        run = simulate(scheduler_of(40, preemption_mode=mode), backlog(300, seed), A_SECOND)
        assert all(served.finished_s > 0 for served in run.by_id.values())
        max_counts.append(max(served.num_preemptions for served in run.by_id.values()))
    assert max_counts[0] == 3 < max_counts[1]


def test_admission_slows_down_when_preemption_is_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals, runs = backlog(400, seed=3), []
    for step_up in (0.0, 1.0):
        monkeypatch.setattr(memory, "STEP_UP", step_up)
        runs.append(simulate(scheduler_of(100), arrivals, A_SECOND))
    eager, slow = runs
    assert slow.num_preemptions < eager.num_preemptions / 2
    assert slow.num_lost_tokens < eager.num_lost_tokens / 2
    assert slow.used > 0.7


def test_headroom_shrinks_when_sequences_end_without_preemption() -> None:
    scheduler = scheduler_of(100)
    headroom = scheduler.memory.headroom
    headroom.blocks_per_row = 8.0
    assert headroom.blocks(64) == 1 + 8 * 64
    for i in range(200):
        add(scheduler, f"more {i}", 2)
        scheduler.control(Abort(f"more {i}"), 0.0)
    assert headroom.blocks_per_row < 0.01
    assert headroom.blocks(64) == headroom.watermark_blocks == 1


def test_headroom_is_at_most_half_the_pool() -> None:
    headroom = memory.Headroom(100, 1)
    for _ in range(50):
        headroom.take_preemption(10)
    assert headroom.blocks(10) == 1 + 50


def test_the_watermark_applies_only_while_other_rows_run() -> None:
    """A request that nearly fills the pool is admitted alone, but not alongside others."""
    scheduler = scheduler_of(100, pipeline_depth=9)
    add(scheduler, "first", 4)
    scheduler.schedule(0.0)
    scheduler.memory.headroom.watermark_blocks = 90
    add(scheduler, "second", 40)  # 10 blocks; 99 are free
    scheduler.schedule(0.0)
    assert running(scheduler) == ["first"]
    scheduler.control(Abort("first"), 0.0)
    scheduler.schedule(0.0)
    assert running(scheduler) == ["second"]


def test_a_group_needs_no_watermark_for_its_own_sequences() -> None:
    """Beams run together, so the last beam to resume must not wait for the others to end."""
    scheduler, executor = dry_run(
        24, BLOCK, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2), 128, False
    )
    branching = BranchingExecutor(executor, sureness=0.5)
    scheduler.add(group_request("beams", list(range(8)), 12, num=4, beams=True), 0.0)
    scheduler.memory.headroom.watermark_blocks = 24
    num_steps, num_partly = 0, 0
    while scheduler.has_work:
        if num_steps == 18:
            scheduler.lifecycle.preempt(scheduler.rows.sequences()[0], "test", 0.0)
            assert scheduler.num_running == 0
        plan = scheduler.schedule(0.0).plan
        assert plan is not None, "the group waits for itself"
        branching.submit(plan)
        scheduler.update(branching.next_result(), 0.0)
        num_steps += 1
        num_partly += 1 <= scheduler.num_running < 4 and num_steps > 18
    assert num_partly > 0, "all resumed at once"


def test_the_reserve_counts_all_rows_but_those_of_the_sequence_s_own_group() -> None:
    scheduler = scheduler_of(100)
    scheduler.memory.headroom.blocks_per_row = 2.0
    add(scheduler, "other", 4)
    scheduler.add(make_request("three", list(range(20, 29)), n=3, max_tokens=20), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and scheduler.num_running == 4
    headroom, leader = scheduler.memory.headroom, scheduler.lifecycle.sequences["three"]
    assert scheduler.admission.reserve(leader) == headroom.blocks(1) == 1 + 2


def test_requests_are_admitted_by_priority_and_then_by_arrival() -> None:
    scheduler = scheduler_of(100, num_rows=3, pipeline_depth=9)
    for name, priority in [("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", -5)]:
        add(scheduler, name, 3, priority)
    scheduler.schedule(0.0)
    assert running(scheduler) == ["c", "e", "b"]
    assert [s.request.request_id for s in scheduler.lifecycle.queue.waiting()] == ["d", "a"]
    add(scheduler, "f", 3, -9)
    scheduler.control(Abort("e"), 0.0)
    scheduler.schedule(0.0)
    assert running(scheduler) == ["f", "c", "b"]
    scheduler.check_invariants()


def test_a_priority_class_is_served_again_after_it_was_empty() -> None:
    scheduler = scheduler_of(100)
    for _ in range(2):
        for priority in (3, 1, 2):
            add(scheduler, f"p{priority}", 3, priority)
        assert [s.priority for s in scheduler.lifecycle.queue.waiting()] == [1, 2, 3]
        for priority in (1, 2, 3):
            head = scheduler.lifecycle.queue.peek()
            assert head is not None and head.priority == priority
            scheduler.control(Abort(f"p{priority}"), 0.0)
        assert scheduler.lifecycle.queue.peek() is None and len(scheduler.lifecycle.queue) == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_latest_arrival_of_the_lowest_priority_is_preempted(mode: str) -> None:
    """No request of its priority or a lower one is admitted before it resumes."""
    scheduler = scheduler_of(33, preemption_mode=mode, pipeline_depth=1)
    arrivals = [("low", 5), ("high", 0), ("low, later", 5), ("high, later", 0)]
    for name, priority in arrivals:
        add(scheduler, name, 8, priority)
    preempted: list[str] = []
    events = listen(scheduler)
    while len(preempted) < 2:
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
        preempted += [e.request_id for e in events if isinstance(e, Preempted)]
        events.clear()
    assert preempted == ["low, later", "low"]
    add(scheduler, "lower", 1, 9)
    add(scheduler, "same", 1, 5)
    add(scheduler, "higher", 1, 4)
    scheduler.control(Abort("high, later"), 0.0)
    order = [sequence.request.request_id for sequence in scheduler.lifecycle.queue.waiting()]
    assert order == ["higher", "low", "low, later", "same", "lower"]


def test_after_three_preemptions_admission_needs_room_for_all_limits() -> None:
    """a: 68 tokens, of which 8 are computed: 17 - 2 blocks. b: 65, and computed nothing yet: 17."""
    scheduler = scheduler_of(100, pipeline_depth=9)
    add(scheduler, "a", 8)
    scheduler.schedule(0.0)
    add(scheduler, "b", 5)
    waiting = scheduler.lifecycle.sequences["b"]
    reserve = scheduler.admission.reserve
    assert reserve(waiting) == 1
    waiting.num_preemptions = admission.MAX_PREEMPTIONS
    assert reserve(waiting) == 15 + 17 - 5 // 4
    waiting.num_preemptions -= 1
    assert reserve(waiting) == 1


def test_a_resumed_prompt_fills_one_block_and_leaves_the_rest_of_the_budget() -> None:
    """A prompt swapped out within a block gets that block's slots, and the next one the rest."""
    scheduler = scheduler_of(100, preemption_mode="swap")
    add(scheduler, "first", 3)
    add(scheduler, "a", 100)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_tokens.tolist() == [3, 61]
    scheduler.update(others(plan), 0.0)
    scheduler.control(Abort("first"), 0.0)
    sequence = scheduler.lifecycle.sequences["a"]
    scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
    assert sequence.num_swapped_tokens == 61
    add(scheduler, "b", 100)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_tokens.tolist() == [3, 61]


def test_a_resumed_group_does_not_report_its_prefix_hit_again() -> None:
    """Only its first sequence has a report; the others were forked from it."""
    scheduler = scheduler_of(64)
    events = listen(scheduler)
    scheduler.add(make_request("three", list(range(20, 29)), n=3, max_tokens=20), 0.0)
    for _ in range(3):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
    sequence = scheduler.lifecycle.sequences["three"]
    scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
    assert scheduler.num_running == 0
    for _ in range(3):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
    assert scheduler.num_running == 3
    assert sum(isinstance(event, PrefixFound) for event in events) == 1
