"""Groups of sequences, before they fork and when they lose their rows."""

import numpy as np
import pytest

from quire.base.messages import Abort
from quire.base.plan import Candidates, Plan, StepResult
from quire.scheduler.beams import BeamSearch
from tests.scheduler.test_admission import BLOCK, others, scheduler_of
from tests.support.scheduler.fake_device import make_request


@pytest.mark.parametrize("back", [False, True])
def test_a_group_preempted_before_its_fork_releases_its_rows_once(back: bool) -> None:
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


def found(scores: dict[int, float], num: int = 4) -> Candidates:
    """Return these tokens as candidates, best first, padded with tokens that are not allowed."""
    tokens = [*scores, *(t for t in range(50) if t not in scores)][:num]
    logprobs = [scores.get(t, -np.inf) for t in tokens]
    ids = np.array([tokens[0], *tokens], np.int32)
    return Candidates(ids, np.array([logprobs[0], *logprobs], np.float32), 1)


def test_a_search_with_too_few_candidates_widens_when_there_are_more() -> None:
    """Tokens that are not allowed are never chosen, and a beam without a token never wins."""
    search = BeamSearch(width=3, max_output=4, stop_token_ids=frozenset({9}))
    alive = search.advance([found({1: -1.0})], [[]])
    assert [(beam.parent, beam.token_id) for beam in alive] == [(0, 1)] * 3
    assert [float(beam.score) for beam in alive] == [-1.0, -np.inf, -np.inf]
    both = found({2: -1.0, 3: -4.0})
    alive = search.advance([both] * 3, [[1]] * 3)
    assert [(beam.token_id, float(beam.score)) for beam in alive] == [
        (2, -2.0), (3, -5.0), (2, -np.inf)
    ]  # fmt: skip
    end = found({9: -0.5})
    assert search.advance([end, end, found({4: 0.0})], [[1, 2], [1, 3], [1, 2]]) == []
    assert search.is_over
    assert [result.token_ids for result in search.hypotheses(3)] == [(1, 2, 9), (1, 3, 9)]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_search_without_any_candidate_ends_with_an_error(num_steps: int) -> None:
    scheduler = scheduler_of(100, num_rows=6, pipeline_depth=1)
    request = make_request("beams", [1, 2, 3], max_tokens=5, n=3, use_beam_search=True)
    scheduler.add(request, 0.0)

    def update(plan: Plan, scores: dict[int, float]):
        rows = plan.sample_rows.tolist()
        zeros = np.zeros((len(rows), 1), np.int32)
        by_row = {row: found(scores) for row in rows}
        return scheduler.update(StepResult(plan.step_id, zeros, zeros[:, 0] + 1, by_row), 0.0)

    for _ in range(num_steps):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        assert not update(plan, {1: -1.0}).outputs
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    [(_, finish)] = update(plan, {}).outputs.finished
    assert finish.reason == "error" and finish.error is not None
    assert "leave its beam search without a token" in finish.error.message
    scheduler.check_invariants()
    assert not scheduler.has_work and scheduler.num_free_rows == 6


def test_members_preempted_after_their_fork_wait_until_one_has_computed_the_prompt() -> None:
    """So that they share its two full blocks."""
    scheduler = scheduler_of(100, num_rows=6, pipeline_depth=1, long_prefill_token_threshold=BLOCK)
    prompt = list(range(2, 2 + 2 * BLOCK))
    scheduler.add(make_request("two", prompt, max_tokens=5, n=2), 0.0)

    def step() -> int:
        """Run a step. Return the number of rows that it started."""
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
        return len(plan.started)

    assert [step(), step()] == [1, 0]
    group = scheduler.lifecycle.sequences["two"].group
    assert group is not None and group.is_forked
    scheduler.lifecycle.preempt(group.members[0], "test", 0.0)
    while scheduler.memory.kv.pools[0].evict():
        pass
    assert [step() for _ in range(3)] == [1, 1, 0]
