"""The status line: when it is logged, and that its rates cover the time since the previous line."""

import numpy as np
import pytest

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.events import Admitted, Finished, Planned, Preempted, Queued, Stepped
from quire.base.settings.config import SchedulerConfig
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.observability.status import StatusLine
from quire.scheduler.scheduler import Scheduler


def new_scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return dry_run(20, 4, config, 1000, True)[0]


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics(4, 1000, counts_hits=True)


class Engine:
    """Emits the events of a request `a` on row 0."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics = metrics
        self.status = StatusLine(metrics, new_scheduler().view)
        self.step_id = 0

    def begin(self, at_s: float, num_prompt: int = 40, num_cached: int = 0) -> None:
        self.metrics(Queued(at_s, "a", num_prompt))
        self.metrics(Admitted(at_s, "a", 0, num_cached))

    def step(self, at_s: float, num_tokens: int = 1) -> str | None:
        self.metrics(Planned(at_s, self.step_id, 1, num_tokens))
        rows = np.zeros(1, np.int32)
        self.metrics(Stepped(at_s, self.step_id, rows, num_tokens, 0.1))
        self.step_id += 1
        return self.status.line(at_s)

    def end(self, at_s: float) -> None:
        self.metrics(Finished(at_s, "a", "length", 1))


def test_rates_cover_the_time_since_the_last_line(metrics: EngineMetrics) -> None:
    engine = Engine(metrics)
    assert engine.status.line(0.0) is None
    engine.begin(0.0, num_prompt=40, num_cached=10)
    assert engine.step(1.0, num_tokens=30) is None
    for second in range(2, 10):
        assert engine.step(float(second)) is None
    line = engine.step(10.0)
    assert line == (
        "3.0 prompt and 1.0 output tokens/s; 0 running, 0 waiting; KV pool 0 % used;"
        " prefix hits 25 %"
    )
    for tenths in range(101, 220):
        assert engine.step(tenths / 10, 1) is None or tenths == 200
    engine.metrics(Preempted(22.0, "a", "b", 3))
    assert engine.status.line(29.9) is None
    line = engine.status.line(40.0)
    assert line is not None
    assert line.startswith("0.0 prompt and 0.9 output tokens/s; "), "19 tokens in 20 s"
    assert line.endswith("; KV pool 0 % used; 1 preempted")


def test_running_waiting_and_pool_usage_are_current(metrics: EngineMetrics) -> None:
    scheduler = new_scheduler()
    for i in range(6):
        scheduler.add(dry_request(f"r{i}", [i] * 9, 4), 0.0)
    status = StatusLine(metrics, scheduler.view)
    assert status.line(0.0) is None
    assert scheduler.schedule(0.0).plan is not None
    line = status.line(10.0)
    assert line is not None, "running requests without tokens must be reported"
    assert line == "0.0 prompt and 0.0 output tokens/s; 4 running, 2 waiting; KV pool 60 % used"


def test_no_line_without_work(metrics: EngineMetrics) -> None:
    engine = Engine(metrics)
    for second in range(50):
        assert engine.status.line(float(second)) is None
    engine.begin(49.2)
    assert engine.step(49.5) is None
    engine.end(49.5)
    lines = [engine.status.line(float(second)) for second in range(50, 90)]
    assert len([line for line in lines if line]) == 1, "one line for the token, then none"


def test_long_idle_time_does_not_dilute_the_rates(metrics: EngineMetrics) -> None:
    """No line is requested between the last step of one request and the first step of the next."""
    engine = Engine(metrics)
    engine.begin(0.0)
    lines = [engine.step(float(second), 1) for second in range(6)]
    engine.end(5.0)
    engine.begin(30_000.0)
    lines += [engine.step(30_000.0 + second, 1) for second in range(5)]
    assert lines == [None] * 11
    line = engine.step(30_005.0, 1)
    assert line is not None
    assert line.startswith("0.1 prompt and 1.1 output tokens/s"), "11 tokens and a prompt in 10 s"


def test_idle_time_with_polling_is_subtracted_once(metrics: EngineMetrics) -> None:
    engine = Engine(metrics)
    engine.begin(0.0)
    engine.step(0.0)
    engine.end(1.0)
    for second in range(1, 1000):
        engine.status.line(float(second))
    engine.begin(1000.0)
    lines = [engine.step(1000.0 + second) for second in range(12)]
    assert len([line for line in lines if line]) == 1


def test_short_idle_times_count_for_the_rates(metrics: EngineMetrics) -> None:
    """One request of one token per second gives one token per second, however short its step."""
    engine = Engine(metrics)
    lines = []
    for second in range(31):
        engine.begin(float(second), num_prompt=1)
        lines.append(engine.step(second + 0.01))
        engine.end(second + 0.01)
    logged = [line for line in lines if line]
    assert len(logged) == 3
    assert all(line.startswith("1.0 prompt and 1.0 output tokens/s") for line in logged)
