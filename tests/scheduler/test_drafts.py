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


def let_guess(scheduler: Scheduler, name: str, num: int) -> None:
    """As `guess`, by the device."""
    scheduler.control(Drafted([Draft(name, 0, 0, [-1] * num)], on_device=True), 0.0)


def result(plan: Plan, *tokens: int) -> StepResult:
    """Of a plan with one row, which got these."""
    return StepResult(plan.step_id, np.array([tokens], np.int32), np.array([len(tokens)]))


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
    assert not scheduler.drafts.drafted


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


def test_plans_follow_each_other_while_the_device_guesses() -> None:
    """Each is planned as if all guesses before it were right, and told apart by the results."""
    scheduler = running(length=6)  # and one token, so that 6 are computed
    scheduler.depth = 3
    sequence = scheduler.lifecycle.sequences["a"]
    plans = []
    for num in (3, 0, 2):
        if num:
            let_guess(scheduler, "a", num)
        plans.append(plan_of(scheduler))
    assert [plan.is_guessing for plan in plans] == [True, False, True]
    assert [plan.computed_bound.tolist() for plan in plans] == [[6], [10], [11]]
    assert [plan.num_tokens.tolist() for plan in plans] == [[4], [1], [3]]
    scheduler.update(result(plans[0], 9, 8), 0.0)  # two of three guesses were wrong
    scheduler.check_invariants()
    assert sequence.num_known_tokens == 9 and sequence.num_computed_tokens == 12
    assert sequence.num_drafts_in_flight == 2
    scheduler.update(result(plans[1], 7), 0.0)
    let_guess(scheduler, "a", 1)
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


def test_a_device_never_guesses_past_the_limit() -> None:
    """Also if all of those in flight are right; then their result is waited for."""
    scheduler = running(max_tokens=9)
    scheduler.depth = 3
    counts = []
    for _ in range(3):
        let_guess(scheduler, "a", 4)
        plan = scheduler.schedule(0.0).plan
        counts.append(None if plan is None else int(plan.num_tokens[0]))
    assert counts == [5, 3, None], "one of nine is there"


def test_nobody_gives_way_while_guesses_may_be_wrong() -> None:
    """A row that would need a block only if they are right waits for their result."""
    scheduler = running(length=13)
    scheduler.depth = 2
    size, pool = scheduler.memory.block_size, scheduler.memory.kv.pools[0]
    sequence = scheduler.lifecycle.sequences["a"]
    room = -(-sequence.num_known_tokens // size) * size - sequence.num_known_tokens
    held = [pool.allocate() for _ in range(pool.num_free)]
    let_guess(scheduler, "a", room)
    first = plan_of(scheduler)
    assert tried(first) == {0: room}
    assert scheduler.schedule(0.0).plan is None and sequence.row >= 0
    scheduler.update(result(first, 3), 0.0)
    assert plan_of(scheduler).num_tokens.tolist() == [1]
    assert held


def test_what_the_device_cannot_guess_for() -> None:
    scheduler = running()
    scheduler.rows.table.is_masked[0] = True
    let_guess(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert not plan.is_guessing and tried(plan) == {}


def test_the_host_does_not_guess_where_the_device_does() -> None:
    """Its guesses would stand where nobody knows."""
    scheduler = running()
    add(scheduler, "b", 4, max_tokens=20)
    scheduler.depth = 3
    while scheduler.lifecycle.sequences["b"].num_output_tokens < 1:
        step(scheduler)
    let_guess(scheduler, "a", 2)
    assert plan_of(scheduler).is_guessing
    guess(scheduler, "b", 2)
    assert tried(plan_of(scheduler)) == {}


def test_a_plan_that_preempts_tries_no_drafts() -> None:
    """What it evicts is copied out first, and the victim's blocks are for those that wait."""
    scheduler = scheduler_of(Fifo, budget=64, blocks=6)
    for name in ("a", "b"):
        add(scheduler, name, 2 * BLOCK, max_tokens=16)
    while scheduler.lifecycle.sequences["a"].num_output_tokens <= BLOCK:
        step(scheduler)
    assert scheduler.num_running == 2 and scheduler.memory.kv.pools[0].num_free == 0
    guess(scheduler, "a", 2)
    plan = plan_of(scheduler)
    assert scheduler.num_running == 1, "b gave its blocks away"
    assert tried(plan) == {} and scheduler.drafts.drafted
    scheduler.update(answer(plan), 0.0)
    guess(scheduler, "a", 2)
    assert tried(plan_of(scheduler)) == {0: 2}, "the next plan does"


def test_no_block_behind_a_stop_token_gets_a_name() -> None:
    """Right drafts were computed beyond it, but their tokens are not the sequence's."""
    groups = CacheGroup("full", (0,), 1, 1), CacheGroup("state", (1,), state_size=1)
    kv = KVManager(groups, (20, 8), BLOCK)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = Scheduler(Memory(kv, 16), config, 64, Fifo)
    add(scheduler, "a", 6, stops=(9,))
    step(scheduler)
    sequence = scheduler.lifecycle.sequences["a"]
    guess(scheduler, "a", 8)
    plan = plan_of(scheduler)
    assert tried(plan) == {0: 8}
    scheduler.update(result(plan, 1, 9, *[1] * 7), 0.0)
    assert "a" not in scheduler.lifecycle.sequences
    known = 6 + 3  # the prompt, and the tokens up to the stop token
    assert len(sequence.digests) == len(kv.pools[0].indexed_blocks()) == known // BLOCK
    scheduler.check_invariants()


def test_drafts_of_the_host_join_earlier_ones_and_those_of_a_device_replace_them() -> None:
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


def test_candidates_are_asked_for_by_how_many_of_their_tokens_are_on_their_way() -> None:
    scheduler = running()
    drafts, sequence = scheduler.drafts, scheduler.lifecycle.sequences["a"]
    assert drafts.candidates() == drafts.candidates(num_pending=None) == [sequence]
    assert drafts.candidates(num_pending=1) == []
    plan_of(scheduler)
    assert drafts.candidates() == []
    assert drafts.candidates(num_pending=1) == drafts.candidates(num_pending=None) == [sequence]


def test_a_row_with_drafts_in_flight_is_no_candidate() -> None:
    scheduler = running()
    guess(scheduler, "a", 3)
    plan = plan_of(scheduler)
    assert tried(plan) == {0: 3}
    assert scheduler.drafts.candidates(num_pending=None) == []
    scheduler.update(result(plan, 1, 1), 0.0)
    assert len(scheduler.drafts.candidates(num_pending=None)) == 1


def test_drafts_of_a_row_that_is_taken_are_forgotten() -> None:
    """Whoever gets the row next has none in flight."""
    for tell, is_held, is_unsure in ((guess, True, False), (let_guess, False, True)):
        scheduler = running()
        tell(scheduler, "a", 2)
        assert tried(plan_of(scheduler)) == {0: 2}
        rows, table = scheduler.rows, scheduler.rows.table
        assert (table.is_held[0], rows.is_any_unsure) == (is_held, is_unsure)
        assert (int(table.verified[0]), int(rows.num_trying)) == (2, 1)
        sequence = scheduler.lifecycle.sequences["a"]
        scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
        assert (int(table.verified[0]), int(rows.num_trying)) == (0, 0)
        assert not table.is_held[0] and not rows.is_any_unsure


def test_a_step_tells_how_many_rows_had_their_first_draft_right_their_second_and_so_on() -> None:
    scheduler = running()
    heard = listen(scheduler)
    step(scheduler)
    for right in (0, 2):
        guess(scheduler, "a", 3)
        plan = plan_of(scheduler)
        scheduler.update(result(plan, *[1] * right, 9), 0.0)
    stepped = [event for event in heard if isinstance(event, Stepped)]
    found = [(event.num_drafts, event.num_draft_tokens, event.accepted_at) for event in stepped]
    assert found == [(0, 0, ()), (1, 3, ()), (1, 3, (1, 1))]
