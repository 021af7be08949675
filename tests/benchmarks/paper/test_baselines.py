"""Baselines on hand-made queues with known results. Each step takes one second."""

import itertools
from typing import Any

import pytest

from benchmarks.paper.baselines.core import BaselineCore, Job
from benchmarks.paper.baselines.faster_transformer import FasterTransformerCore
from benchmarks.paper.baselines.orca import OrcaCore, longest, oracle, pow2
from benchmarks.paper.settings import Method, paper_request
from quire.base.clock import FakeClock
from quire.tools.simulate.arrivals import Arrival
from quire.tools.simulate.run import Run, run_all
from quire.tools.simulate.served import Served
from quire.tools.step_times import Attention, Roofline

SECOND = Roofline(weights_s=1.0, token_s=0.0)
MAX_LEN = 64
NUMBERS = itertools.count()


def arrival(at_s: float, prompt: int, output: int, num: int = 1, beams: bool = False) -> Arrival:
    name = f"request {next(NUMBERS)}"
    method = Method("", num, beams)
    return Arrival(at_s, paper_request(name, [1] * prompt, output, method), output)


def serve(
    kind: Any, num_slots: int, *arrivals: Arrival, times: Roofline = SECOND, **more: Any
) -> tuple[list[Served], BaselineCore]:
    clock, run = FakeClock(), Run()
    core = kind(times, clock, run.by_id, num_slots, MAX_LEN, **more)
    run_all([core], arrivals, clock, run)
    return [run.by_id[each.request.request_id] for each in arrivals], core


def orca(num_slots: int, reserve: Any, *arrivals: Arrival, **more: Any) -> Any:
    limits = {"max_num_seqs": 8, "max_num_tokens": 1000} | more
    return serve(OrcaCore, num_slots, *arrivals, reserve=reserve, **limits)


def ends(served: list[Served]) -> list[float]:
    return [each.finished_s for each in served]


def test_orca_admits_and_ends_requests_at_each_iteration() -> None:
    served, _ = orca(4 * MAX_LEN, longest, arrival(0, 4, 3), arrival(0.5, 4, 1), arrival(0.6, 4, 5))
    assert ends(served) == [3.0, 2.0, 6.0]


def test_orca_max_admits_few_requests() -> None:
    """Two chunks of 64 fit, so the third request waits for an end, although little is used."""
    requests = [arrival(0, 4, 2), arrival(0.1, 4, 5), arrival(0.2, 4, 2), arrival(0.3, 4, 1)]
    served, core = orca(2 * MAX_LEN, longest, *requests)
    assert ends(served) == [2.0, 6.0, 4.0, 5.0]
    served, _ = orca(2 * MAX_LEN, oracle, *requests)
    assert ends(served) == [2.0, 6.0, 3.0, 2.0]  # all run together
    shares = core.batches.memory.shares
    assert shares["other"] == 0.0 and shares["never"] > 0.5


def test_reservations_follow_the_policy() -> None:
    """Four samples of 16 slots fill 64 slots. Later requests wait in order of arrival."""
    requests = [arrival(0, 8, 8, 4), arrival(0, 8, 8, 2, beams=True), arrival(0, 2, 1)]
    served, _ = orca(64, oracle, *requests)
    assert ends(served) == [8.0, 16.0, 9.0]
    job = Job("", Served(0.0), 10, 25, 1)
    assert [each(job, 2048) for each in (oracle, pow2, longest)] == [35, 42, 2048]


def test_memory_shares_are_counted_while_a_request_waits() -> None:
    """One request of 4 + 4 tokens holds all 64 slots, and another waits for 4 steps."""
    _, core = orca(64, longest, arrival(0, 4, 4), arrival(0, 4, 1))
    shares = core.batches.memory.shares
    live = (4 + 5 + 6 + 7) / 4
    assert shares["live"] == pytest.approx(live / 64)
    assert shares["later"] == pytest.approx((8 - live) / 64)
    assert shares["never"] == pytest.approx(56 / 64)


def test_step_time_depends_on_tokens_and_contexts() -> None:
    """A batch of two has 3 + 5 prompt tokens, then contexts of 4 + 6, then 7."""
    times = Roofline(0.0, 1.0, (Attention(100.0),))
    served, _ = orca(4 * MAX_LEN, longest, arrival(0, 3, 2), arrival(0, 5, 3), times=times)
    first = 8 + 100 * 8
    second = first + 2 + 100 * (4 + 6)
    assert ends(served) == [second, second + 1 + 100 * 7]


def test_faster_transformer_runs_each_batch_to_its_end() -> None:
    requests = [arrival(0, 4, 2), arrival(0, 4, 5), arrival(0.1, 4, 1), arrival(0.2, 4, 3)]
    served, core = serve(FasterTransformerCore, 2 * MAX_LEN + 10, *requests)
    assert ends(served) == [5.0, 5.0, 8.0, 8.0]
    assert core.batches.mean == 2.0


def test_faster_transformer_pads_batches() -> None:
    """Prompts of 3 and 5 are padded to 5. Two rows read contexts of 2 x 6, then of 2 x 7."""
    times = Roofline(0.0, 1.0, (Attention(100.0),))
    served, _ = serve(
        FasterTransformerCore, 2 * MAX_LEN, arrival(0, 3, 1), arrival(0, 5, 3), times=times
    )
    assert ends(served) == [10 + 1000 + 2 + 100 * 12 + 2 + 100 * 14] * 2
