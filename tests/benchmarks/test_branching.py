"""Beam search and samples in a scheduler without a model."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.virtual.branching import BranchingExecutor, group_request, random_logprobs
from benchmarks.virtual.dry_run import dry_run
from quire.base.config import SchedulerConfig
from quire.base.plan import Plan, RowFork, RowStart
from quire.base.sampling_params import SamplingParams


@pytest.mark.parametrize("sureness", [0.3, 0.6, 0.9])
def test_two_draws_agree_as_often_as_the_sureness_says(sureness: float) -> None:
    logprobs = random_logprobs(20_000, sureness, np.random.default_rng(0))
    probabilities = np.exp(logprobs)
    assert (np.diff(logprobs) < 0).all(), "the candidates fall"
    assert (probabilities.sum(1) <= 1 + 1e-9).all()
    assert np.square(probabilities).sum(1).mean() == pytest.approx(sureness, abs=0.01)


def test_beams_of_a_request_are_alike_as_often_as_is_said() -> None:
    """Rows 0 and 2 belong to one request, row 1 to another."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    _, executor = dry_run(8, 4, config, 64, enable_prefix_caching=False)
    branching = BranchingExecutor(executor, sureness=0.5, alike=0.75)
    rows, num = np.array([0, 1, 2], np.int32), np.full(3, 4, np.int32)
    params = SamplingParams()
    started = tuple(RowStart(row, rows[:1], 0, 1, params, 0) for row in (0, 1))
    num_alike = 0
    for step in range(400):
        plan = Plan(step, rows, sample_rows=rows, num_candidates=num)
        if step == 0:
            plan = replace(plan, started=started, forked=(RowFork(0, 2, 1),))
        branching.submit(plan)
        got = branching.next_result().candidates
        assert all(len(found.token_ids) == len(found.logprobs) == 5 for found in got.values())
        assert not np.array_equal(got[0].logprobs, got[1].logprobs)
        same = np.array_equal(got[0].logprobs, got[2].logprobs)
        assert same == np.array_equal(got[0].token_ids, got[2].token_ids)
        num_alike += same
    assert 270 <= num_alike <= 330


@pytest.mark.parametrize("beams", [False, True])
def test_groups_run_to_their_ends(beams: bool) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    scheduler, executor = dry_run(200, 4, config, 64, enable_prefix_caching=False)
    branching = BranchingExecutor(executor, sureness=0.5)
    for i in range(3):
        scheduler.add(group_request(str(i), list(range(9)), 20, num=4, beams=beams), 0.0)
    num_hypotheses = num_endings = 0
    saved = []
    while (plan := scheduler.schedule(0.0).plan) is not None:
        held = sum(len(s.blocks.tables[0].live_blocks) for s in scheduler.rows.sequences())
        saved.append(held - scheduler.memory.kv.pools[0].num_used)
        branching.submit(plan)
        outputs = scheduler.update(branching.next_result(), 0.0).outputs
        scheduler.check_invariants()
        for update, _ in outputs.finished:
            num_endings += update.beams is None
            num_hypotheses += update.beams is not None
            if update.beams is not None:
                assert [len(beam.token_ids) for beam in update.beams] == [20] * 4
                texts = {tuple(beam.token_ids) for beam in update.beams}
                assert len(texts) == 4, "the beams are to differ"
    assert (num_hypotheses, num_endings) == ((3, 0) if beams else (0, 12))
    # Two full blocks of the prompt, by four sequences of two groups; beams share more than that.
    assert max(saved) > 12 if beams else saved[-1] in (6, 12)
