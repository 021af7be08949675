"""Virtual runs: times, tokens and preemptions are reported as they happen."""

import pytest

from benchmarks.virtual.dry_run import dry_run
from quire.base.clock import FakeClock
from quire.base.settings.config import SchedulerConfig
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.replica import Replica
from quire.tools.simulate.run import Routing, Run, run_all, simulate
from quire.tools.simulate.served import BUDGET, MEMORY, ROW, STEP
from quire.tools.step_times import Attention, Roofline
from quire.tools.workloads import token_ids_of


def test_times_follow_the_formula() -> None:
    """A step reads 1 s of weights, or computes 0.1 s per token; contexts cost 0.01 s per token."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler, _ = dry_run(100, 4, config, 128, enable_prefix_caching=False)
    arrivals = [
        Arrival(5.0, simulated_request("later", list(range(30)), 9), 1),
        Arrival(0.5, simulated_request("first", list(range(20)), 9), 3),
    ]
    run = simulate(scheduler, arrivals, Roofline(1.0, 0.1, (Attention(0.01),)))
    first, later = run.by_id["first"], run.by_id["later"]
    assert first.arrived_s == first.admitted_s == 0.5
    assert first.first_token_s == pytest.approx(0.5 + 2.0 + 0.2)
    assert first.finished_s == pytest.approx(2.7 + (1 + 0.21) + (1 + 0.22))
    assert later.arrived_s == 5.0
    assert later.admitted_s == first.finished_s  # it arrived during the previous step
    assert later.first_token_s == later.finished_s == pytest.approx(5.13 + 3.0 + 0.3)
    assert (first.num_output, later.num_output) == (3, 1)
    assert (run.num_output, run.num_steps) == (4, 4)
    assert run.tokens_per_s == pytest.approx(4 / later.finished_s)
    assert run.most_used == 8


def test_requests_queue_for_one_row() -> None:
    """Each request takes two steps of one second, one request after another."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64)
    scheduler, _ = dry_run(100, 4, config, 128, enable_prefix_caching=False)
    arrivals = [Arrival(0.0, simulated_request(str(i), [3] * 5, 9), 2) for i in range(3)]
    run = simulate(scheduler, arrivals, Roofline(1.0, 0.0))
    assert [run.by_id[str(i)].wait_s for i in range(3)] == [1.0, 3.0, 5.0]
    assert [run.by_id[str(i)].finished_s for i in range(3)] == [2.0, 4.0, 6.0]
    assert run.gaps_s.tolist() == [1.0, 1.0, 1.0]
    assert run.waits == {STEP: 0.0, ROW: 2 + 2 + 1 + 1.0, MEMORY: 0.0, BUDGET: 0.0}


def test_waits_are_split_by_reason() -> None:
    """Two prompts of 10 tokens share a budget of 10; two of 20 tokens share six blocks."""
    config = SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=10)
    scheduler, _ = dry_run(100, 4, config, 128, enable_prefix_caching=False)
    two = [Arrival(0.0, simulated_request(str(i), [3] * 10, 9), 1) for i in range(2)]
    late = Arrival(0.25, simulated_request("late", [3] * 5, 9), 1)
    run = simulate(scheduler, [*two, late], Roofline(1.0, 0.0))
    assert run.waits[BUDGET] == 2.0 and run.waits[STEP] == 0.75
    scheduler, _ = dry_run(6, 4, SchedulerConfig(9, 64), 24, enable_prefix_caching=False)
    large = [Arrival(0.0, simulated_request(str(i), [3] * 18, 9), 2) for i in range(2)]
    run = simulate(scheduler, large, Roofline(1.0, 0.0))
    assert run.waits[MEMORY] == 2.0
    alone = [Arrival(0.0, simulated_request("a", [3] * 9, 9), 2)]
    alone.append(Arrival(0.5, simulated_request("b", [3] * 2, 9), 1))
    scheduler, _ = dry_run(100, 4, SchedulerConfig(9, 64), 24, enable_prefix_caching=False)
    run = simulate(scheduler, alone, Roofline(1.0, 0.0))
    assert run.waits[STEP] == 0.5 and run.by_id["b"].wait_s == 1.5


def test_host_time_counts_unless_a_plan_is_in_flight() -> None:
    for depth, ends_s in ((1, 4 * 1.25), (2, 4 + 0.25)):
        config = SchedulerConfig(4, 64, pipeline_depth=depth)
        scheduler, _ = dry_run(100, 4, config, 128, enable_prefix_caching=False)
        arrivals = [Arrival(0.0, simulated_request("a", [3] * 5, 9), 4)]
        run = simulate(scheduler, arrivals, Roofline(1.0, 0.0, host_s=0.25))
        assert run.by_id["a"].finished_s == ends_s


def test_requests_are_routed_to_the_replica_with_their_prefix() -> None:
    """Conversations with one prefix stay on one of two replicas; others spread."""
    clock, run = FakeClock(), Run()
    cores = [
        Replica(
            dry_run(1000, 4, SchedulerConfig(8, 64), 256, True)[0],
            Roofline(1.0, 0.0),
            clock,
            number,
            run.by_id,
            1000,
        )
        for number in range(2)
    ]
    parts = [[(1 + i % 2, 40), (10 + i, 8)] for i in range(8)]
    arrivals = [
        Arrival(3.0 * i, simulated_request(str(i), token_ids_of(each, 1000), 9), 2)
        for i, each in enumerate(parts)
    ]
    run_all(cores, arrivals, clock, run, routing=Routing(4))
    where = [run.by_id[str(i)].replica for i in range(8)]
    assert where in ([0, 1] * 4, [0] * 8) and len(run.listeners) == 2
    assert all(served.num_cached_tokens == 40 for served in list(run.by_id.values())[2:])


def test_preemptions_lose_no_tokens_and_no_time() -> None:
    """Two requests outgrow the pool, so one is preempted. The gaps add up to the whole time."""
    config = SchedulerConfig(4, 64, preemption_mode="recompute")
    scheduler, _ = dry_run(10, 4, config, 40, enable_prefix_caching=False)
    arrivals = [Arrival(0.0, simulated_request(str(i), [3] * 8, 20), 20) for i in range(2)]
    run = simulate(scheduler, arrivals, Roofline(1.0, 0.0))
    assert run.num_preemptions >= 1 and run.num_output == 40
    for served in run.by_id.values():
        assert served.finished_s > 0
    whole = sum(served.finished_s - served.first_token_s for served in run.by_id.values())
    assert len(run.gaps_s) == 38
    assert run.gaps_s.sum() == pytest.approx(whole)


def test_unservable_request_gets_an_error() -> None:
    scheduler, _ = dry_run(10, 4, SchedulerConfig(4, 64), 32, enable_prefix_caching=False)
    arrivals = [Arrival(0.0, simulated_request(str(n), [3] * n, 4), 2) for n in (8, 50)]
    run = simulate(scheduler, arrivals, Roofline(1.0, 0.0))
    assert run.by_id["8"].finished_s == 2.0 and "max_model_len" in run.by_id["50"].error
