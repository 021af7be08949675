"""Virtual runs: times, tokens and preemptions are told as they happen."""

import pytest

from benchmarks.virtual.dry_run import dry_run
from benchmarks.virtual.simulate import Arrival, StepTime, simulate, simulated_request
from quire.base.config import SchedulerConfig


def test_times_are_those_of_the_formula() -> None:
    """A step reads 1 s of weights, or computes 0.1 s per token; contexts cost 0.01 s per token."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, _ = dry_run(100, 4, config, 128, enable_prefix_caching=False)
    arrivals = [
        Arrival(5.0, simulated_request("later", list(range(30)), 9), 1),
        Arrival(0.5, simulated_request("first", list(range(20)), 9), 3),
    ]
    run = simulate(scheduler, arrivals, StepTime(1.0, 0.1, 0.01))
    first, later = run.by_id["first"], run.by_id["later"]
    assert first.arrived_s == first.admitted_s == 0.5
    assert first.first_token_s == pytest.approx(0.5 + 2.0 + 0.2)
    assert first.finished_s == pytest.approx(2.7 + (1 + 0.21) + (1 + 0.22))
    assert later.arrived_s == 5.0
    assert later.admitted_s == first.finished_s  # it came during the step before
    assert later.first_token_s == later.finished_s == pytest.approx(5.13 + 3.0 + 0.3)
    assert (first.num_output, later.num_output) == (3, 1)
    assert (run.num_output, run.num_steps) == (4, 4)
    assert run.tokens_per_s == pytest.approx(4 / later.finished_s)
    assert run.most_used == 8


def test_copies_take_time() -> None:
    step_time = StepTime(1.0, 0.1, 0.0, copy_s=0.5)
    assert step_time.of(3, 100, 4) == 3.0
