"""Draft tokens in the scheduler: limits by budget, blocks and length, and no outdated drafts."""

import numpy as np

from quire.base.events import Stepped
from quire.base.messages import Draft, Drafted
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.scheduler.branching.drafts import Drafts
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.queue import Fifo
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.events import listen
from tests.support.scheduler.plain_scheduler import BLOCK, add, answer, scheduler_of, step


def propose(scheduler: Scheduler, name: str, num: int, known: int | None = None) -> None:
    sequence = scheduler.lifecycle.sequences[name]
    known = sequence.num_known_tokens if known is None else known
    scheduler.control(Drafted([Draft(name, 0, known, [1] * num)]), 0.0)


def plan_of(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    return plan


def num_drafts_of(plan: Plan) -> dict[int, int]:
    return {draft.row: len(draft.token_ids) for draft in plan.drafts}


def propose_on_device(scheduler: Scheduler, name: str, num: int) -> None:
    """Propose draft tokens as `propose` does, but on the device."""
    scheduler.control(Drafted([Draft(name, 0, 0, [-1] * num)], on_device=True), 0.0)


def result(plan: Plan, *tokens: int) -> StepResult:
    """Return the result of a plan with one row, which got these tokens."""
    return StepResult(plan.step_id, np.array([tokens], np.int32), np.array([len(tokens)]))


def running(budget: int = 64, length: int = 6, max_tokens: int = 50) -> Scheduler:
    """Return a scheduler in which `a` runs and has one output token."""
    scheduler = scheduler_of(Fifo, budget=budget)
    add(scheduler, "a", length, max_tokens=max_tokens)
    while scheduler.lifecycle.sequences["a"].num_output_tokens < 1:
        step(scheduler)
    return scheduler


def test_draft_tokens_are_verified_once() -> None:
    scheduler = running()
    propose(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert num_drafts_of(plan) == {0: 3} and plan.num_tokens.tolist() == [4]
    assert plan.num_drafts.tolist() == [3]
    scheduler.update(StepResult(plan.step_id, np.array([[9]]), np.array([1])), 0.0)
    assert num_drafts_of(plan_of(scheduler)) == {}


def test_drafts_for_outdated_tokens_are_dropped() -> None:
    scheduler = running()
    propose(scheduler, "a", 3, known=5)
    assert num_drafts_of(plan_of(scheduler)) == {}
    assert not scheduler.drafts.drafted


def test_prompts_get_the_budget_before_drafts() -> None:
    scheduler = running(budget=8)
    add(scheduler, "b", 5)
    propose(scheduler, "a", 6)
    plan = plan_of(scheduler)
    assert sorted(plan.num_tokens.tolist()) == [3, 5], "`a` gets three of eight"
    assert num_drafts_of(plan) == {0: 2}


def test_without_free_blocks_drafts_fill_only_the_row_s_own_blocks() -> None:
    scheduler = running(length=13)
    size = scheduler.memory.block_size
    held = scheduler.memory.kv.pools[0]
    while held.num_free:
        held.allocate()
    propose(scheduler, "a", 12)
    known = scheduler.lifecycle.sequences["a"].num_known_tokens
    assert num_drafts_of(plan_of(scheduler)) == {0: -(-known // size) * size - known}


def test_drafts_never_exceed_max_tokens() -> None:
    scheduler = running(max_tokens=5)
    propose(scheduler, "a", 20)
    assert num_drafts_of(plan_of(scheduler)) == {0: 3}, "one is known, the last is sampled"


def test_blocks_of_rejected_drafts_are_freed() -> None:
    scheduler = running(length=6)
    pool = scheduler.memory.kv.pools[0]
    propose(scheduler, "a", 3)
    before = pool.num_used
    plan = plan_of(scheduler)
    scheduler.update(StepResult(plan.step_id, np.array([[9]]), np.array([1])), 0.0)
    scheduler.check_invariants()
    assert pool.num_used <= before + 1


def test_no_drafts_are_verified_after_a_pending_token() -> None:
    scheduler = running()
    plan_of(scheduler)
    assert scheduler.drafts.candidates() == []
    propose(scheduler, "a", 3)
    scheduler.depth = 2
    plan = scheduler.schedule(0.0).plan
    assert plan is None or num_drafts_of(plan) == {}


def test_a_block_evicted_for_drafts_is_copied_out_by_the_same_plan() -> None:
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
    propose(scheduler, "a", 8)
    plan = plan_of(scheduler)
    assert num_drafts_of(plan) == {0: 8}
    given = {block for block in plan.block_writes.block_id.tolist() if block in cached}
    copied = {block for move in plan.moves for block in move.source.tolist()}
    assert given and given <= copied


def test_plans_are_made_ahead_while_the_device_drafts() -> None:
    """Each plan assumes that all earlier drafts are accepted. The results correct this."""
    scheduler = running(length=6)  # and one token, so that 6 are computed
    scheduler.depth = 3
    sequence = scheduler.lifecycle.sequences["a"]
    plans = []
    for num in (3, 0, 2):
        if num:
            propose_on_device(scheduler, "a", num)
        plans.append(plan_of(scheduler))
    assert [plan.is_guessing for plan in plans] == [True, False, True]
    assert [plan.computed_bound.tolist() for plan in plans] == [[6], [10], [11]]
    assert [plan.num_tokens.tolist() for plan in plans] == [[4], [1], [3]]
    scheduler.update(result(plans[0], 9, 8), 0.0)  # two of three drafts are rejected
    scheduler.check_invariants()
    assert sequence.num_known_tokens == 9 and sequence.num_computed_tokens == 12
    assert sequence.num_drafts_in_flight == 2
    scheduler.update(result(plans[1], 7), 0.0)
    propose_on_device(scheduler, "a", 1)
    plan = plan_of(scheduler)
    assert plan.computed_bound.tolist() == [12]
    scheduler.update(result(plans[2], 1, 1, 1), 0.0)
    scheduler.update(result(plan, 5), 0.0)
    scheduler.check_invariants()
    assert sequence.known_tokens[6:].tolist()[1:] == [9, 8, 7, 1, 1, 1, 5]
    assert (
        sequence.num_computed_tokens == sequence.num_known_tokens - 1
        and not scheduler.drafts.drafted
    )


def test_a_device_never_drafts_past_max_tokens() -> None:
    """The limit counts all drafts in flight as accepted, so a plan may wait for their result."""
    scheduler = running(max_tokens=9)
    scheduler.depth = 3
    counts = []
    for _ in range(3):
        propose_on_device(scheduler, "a", 4)
        plan = scheduler.schedule(0.0).plan
        counts.append(None if plan is None else int(plan.num_tokens[0]))
    assert counts == [5, 3, None], "one of nine tokens is known"


def test_no_row_is_preempted_while_drafts_are_in_flight() -> None:
    """A row that needs a block only if they are accepted waits for their result."""
    scheduler = running(length=13)
    scheduler.depth = 2
    size, pool = scheduler.memory.block_size, scheduler.memory.kv.pools[0]
    sequence = scheduler.lifecycle.sequences["a"]
    room = -(-sequence.num_known_tokens // size) * size - sequence.num_known_tokens
    held = [pool.allocate() for _ in range(pool.num_free)]
    propose_on_device(scheduler, "a", room)
    first = plan_of(scheduler)
    assert num_drafts_of(first) == {0: room}
    assert scheduler.schedule(0.0).plan is None and sequence.row >= 0
    scheduler.update(result(first, 3), 0.0)
    assert plan_of(scheduler).num_tokens.tolist() == [1]
    assert held


def test_the_device_does_not_draft_for_a_masked_row() -> None:
    scheduler = running()
    scheduler.rows.table.is_masked[0] = True
    propose_on_device(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert not plan.is_guessing and num_drafts_of(plan) == {}


def test_host_drafts_are_ignored_while_the_device_drafts() -> None:
    """The positions of host drafts would be unknown."""
    scheduler = running()
    add(scheduler, "b", 4, max_tokens=20)
    scheduler.depth = 3
    while scheduler.lifecycle.sequences["b"].num_output_tokens < 1:
        step(scheduler)
    propose_on_device(scheduler, "a", 2)
    assert plan_of(scheduler).is_guessing
    propose(scheduler, "b", 2)
    assert num_drafts_of(plan_of(scheduler)) == {}


def test_a_plan_that_preempts_verifies_no_drafts() -> None:
    """Evicted blocks are copied out first, and the freed blocks are for waiting sequences."""
    scheduler = scheduler_of(Fifo, budget=64, blocks=6)
    for name in ("a", "b"):
        add(scheduler, name, 2 * BLOCK, max_tokens=16)
    while scheduler.lifecycle.sequences["a"].num_output_tokens <= BLOCK:
        step(scheduler)
    assert scheduler.num_running == 2 and scheduler.memory.kv.pools[0].num_free == 0
    propose(scheduler, "a", 2)
    plan = plan_of(scheduler)
    assert scheduler.num_running == 1, "b was preempted"
    assert num_drafts_of(plan) == {} and scheduler.drafts.drafted
    scheduler.update(answer(plan), 0.0)
    propose(scheduler, "a", 2)
    assert num_drafts_of(plan_of(scheduler)) == {0: 2}, "the next plan verifies drafts"


def test_blocks_after_a_stop_token_get_no_name() -> None:
    """Accepted drafts after it were computed, but they are not tokens of the sequence."""
    groups = CacheGroup("full", (0,), 1, 1), CacheGroup("state", (1,), state_size=1)
    kv = KVManager(groups, (20, 8), BLOCK)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = Scheduler(Memory(kv, 16), config, 64, Fifo)
    add(scheduler, "a", 6, stops=(9,))
    step(scheduler)
    sequence = scheduler.lifecycle.sequences["a"]
    propose(scheduler, "a", 8)
    plan = plan_of(scheduler)
    assert num_drafts_of(plan) == {0: 8}
    scheduler.update(result(plan, 1, 9, *[1] * 7), 0.0)
    assert "a" not in scheduler.lifecycle.sequences
    known = 6 + 3  # the prompt, and the tokens up to the stop token
    assert len(sequence.digests) == len(kv.pools[0].indexed_blocks()) == known // BLOCK
    scheduler.check_invariants()


def test_host_drafts_join_earlier_drafts_and_device_drafts_replace_them() -> None:
    scheduler = running()

    def kept(*messages: Drafted) -> set[str]:
        drafts = Drafts(scheduler.rows, scheduler.memory, scheduler.lifecycle)
        for message in messages:
            drafts.take(message)
        return {name for name, _ in drafts.drafted}

    host, device = (
        [Drafted([Draft(name, 0, 7, [1])], on_device=on_device) for name in "ab"]
        for on_device in (False, True)
    )
    assert kept(*host) == {"a", "b"}
    assert kept(*device) == kept(host[0], device[1]) == kept(device[0], host[1]) == {"b"}


def test_candidates_are_selected_by_their_number_of_pending_tokens() -> None:
    scheduler = running()
    drafts, sequence = scheduler.drafts, scheduler.lifecycle.sequences["a"]
    assert drafts.candidates() == drafts.candidates(num_pending=None) == [sequence]
    assert drafts.candidates(num_pending=1) == []
    plan_of(scheduler)
    assert drafts.candidates() == []
    assert drafts.candidates(num_pending=1) == drafts.candidates(num_pending=None) == [sequence]


def test_a_row_with_drafts_in_flight_is_no_candidate() -> None:
    scheduler = running()
    propose(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert num_drafts_of(plan) == {0: 3}
    assert scheduler.drafts.candidates(num_pending=None) == []
    scheduler.update(result(plan, 1, 1), 0.0)
    assert len(scheduler.drafts.candidates(num_pending=None)) == 1


def test_preemption_clears_the_drafts_of_the_row() -> None:
    """The next sequence of this row has no drafts in flight."""
    for send, is_held, is_unsure in ((propose, True, False), (propose_on_device, False, True)):
        scheduler = running()
        send(scheduler, "a", 2)
        assert num_drafts_of(plan_of(scheduler)) == {0: 2}
        rows, table = scheduler.rows, scheduler.rows.table
        assert (table.is_held[0], rows.is_any_unsure) == (is_held, is_unsure)
        assert (int(table.verified[0]), int(rows.num_trying)) == (2, 1)
        sequence = scheduler.lifecycle.sequences["a"]
        scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
        assert (int(table.verified[0]), int(rows.num_trying)) == (0, 0)
        assert not table.is_held[0] and not rows.is_any_unsure


def test_a_step_event_counts_accepted_drafts_by_position() -> None:
    scheduler = running()
    events = listen(scheduler)
    step(scheduler)
    for right in (0, 2):
        propose(scheduler, "a", 3)
        plan = plan_of(scheduler)
        scheduler.update(result(plan, *[1] * right, 9), 0.0)
    stepped = [event for event in events if isinstance(event, Stepped)]
    found = [(event.num_drafts, event.num_draft_tokens, event.accepted_at) for event in stepped]
    assert found == [(0, 0, ()), (1, 3, ()), (1, 3, (1, 1))]
