"""Prompts that arrive in pieces: waiting, preemption, and refused pieces."""

import msgspec
import pytest

from quire.base.errors import RequestError
from quire.base.messages import Append
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.queue import Fifo
from quire.scheduler.core.sequence import State
from tests.scheduler.test_table_4_1 import counters, open_prompt
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import add, scheduler_of, step


def test_the_last_piece_of_a_prompt_is_computed_in_one_step() -> None:
    scheduler = scheduler_of(Fifo, budget=8)
    open_prompt(scheduler, "a", list(range(30)))
    for _ in range(4):
        step(scheduler)
    scheduler.control(Append("a", [1, 2, 3, 4], is_last=True), 0.0)
    assert step(scheduler) == {"a": 5}
    assert scheduler.lifecycle.sequences["a"].num_output_tokens == 1


def test_an_idle_open_prompt_takes_no_budget() -> None:
    scheduler = scheduler_of(Fifo)
    open_prompt(scheduler, "open", [5])
    add(scheduler, "cached", 9)
    step(scheduler)
    prompt = scheduler.lifecycle.sequences["cached"].request.prompt_token_ids
    open_prompt(scheduler, "hit", prompt)  # all but the last token is in the index
    add(scheduler, "behind", 15)
    assert step(scheduler) == {"cached": 1, "behind": 15}
    scheduler.control(Append("hit", [], is_last=True), 0.0)
    scheduler.control(Append("open", [6], is_last=True), 0.0)
    assert step(scheduler) == {"cached": 1, "behind": 1, "open": 2, "hit": 1}


def test_an_idle_open_prompt_that_is_swapped_out_takes_no_budget() -> None:
    scheduler = scheduler_of(Fifo, preemption_mode="swap")
    open_prompt(scheduler, "open", list(range(9)))
    step(scheduler)
    sequence = scheduler.lifecycle.sequences["open"]
    scheduler.preemption.preempt(sequence, "other", PlanBuilder(9), 0.0)
    assert sequence.state is State.SWAPPED and not sequence.has_something_to_compute
    add(scheduler, "other", 20)
    assert step(scheduler) == {"other": 16}
    assert sequence.state is State.PARKED


@pytest.mark.parametrize("settings", [{"max_num_seqs": 1}, {"blocks": 16}])
def test_an_idle_open_prompt_is_preempted_for_a_waiting_request(settings: dict[str, int]) -> None:
    """That request needs its row or its blocks. The open prompt resumes with its next piece."""
    scheduler = scheduler_of(Fifo, **settings)
    open_prompt(scheduler, "idle", list(range(40)))
    for _ in range(3):
        step(scheduler)
    assert counters(scheduler, "idle") == "39/40"
    add(scheduler, "other", 40, max_tokens=2)
    assert step(scheduler) == {"other": 16}
    assert scheduler.lifecycle.sequences["idle"].state is State.PARKED
    scheduler.control(Append("idle", [1], is_last=True), 0.0)
    for _ in range(20):
        step(scheduler)
    assert not scheduler.lifecycle.sequences and scheduler.memory.kv.pools[0].num_used == 0


def test_a_piece_that_begins_a_new_block_also_copies_a_shared_block() -> None:
    """The row's last block is half full, and shared. A piece that fills it and begins the next one
    needs two blocks: the copy and the new one."""
    scheduler = scheduler_of(Fifo)
    open_prompt(scheduler, "a", list(range(7)))
    step(scheduler)
    sequence, pool = scheduler.lifecycle.sequences["a"], scheduler.memory.kv.pools[0]
    other = scheduler.memory.kv.fork(sequence.blocks)
    scheduler.rows.share(sequence.row)
    shared = other.tables[0].blocks[1]
    scheduler.control(Append("a", [1, 2, 3]), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_tokens.tolist() == [3]
    assert counters(scheduler, "a") == "9/10"
    mine = sequence.blocks.tables[0].blocks
    assert mine[0] == other.tables[0].blocks[0] and mine[1] != shared and len(mine) == 3
    assert [move.source.tolist() for move in plan.moves] == [[shared]]
    assert pool.num_refs(shared) == 1, "only the other one holds it"


def test_an_open_prompt_of_a_higher_priority_is_not_preempted() -> None:
    scheduler = scheduler_of(Fifo, max_num_seqs=1)
    open_prompt(scheduler, "idle", list(range(9)))
    step(scheduler)
    add(scheduler, "lower", 4, priority=1)
    assert step(scheduler) == {}


def test_a_prompt_that_grows_too_long_ends_with_an_error() -> None:
    scheduler = scheduler_of(Fifo, blocks=4)
    open_prompt(scheduler, "a", [1, 2, 3])
    step(scheduler)
    scheduler.control(Append("a", [1] * 20), 0.0)
    decisions = scheduler.schedule(0.0)
    assert [finish.reason for _, finish in decisions.outputs.finished] == ["error"]
    assert decisions.plan is None and not scheduler.has_work


def test_an_open_prompt_with_samples_or_prompt_logprobs_is_refused() -> None:
    scheduler = scheduler_of(Fifo)
    for more in ({"n": 2, "temperature": 1.0}, {"prompt_logprobs": 1}):
        request = make_request("a", [1, 2, 3], max_tokens=9, **more)
        refusal = scheduler.add(msgspec.structs.replace(request, is_open=True), 0.0).refusal
        assert isinstance(refusal, RequestError) and "sent in pieces" in str(refusal)
