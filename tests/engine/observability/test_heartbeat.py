"""A step counts as stuck after ten times its expected time, and after ten seconds at least."""

from pathlib import Path

import pytest

from benchmarks.virtual.dry_run import dry_run
from quire.base.clock import FakeClock
from quire.base.plan import Plan
from quire.base.settings.config import SchedulerConfig, config_from_flat
from quire.engine.observability.beating import BeatingExecutor
from quire.engine.observability.heartbeat import (
    MIN_LIMIT_S,
    Heartbeat,
    HeartbeatReader,
    StuckWatch,
    expected_step_s,
)


def test_unfinished_step_is_stuck_after_ten_seconds(tmp_path: Path) -> None:
    reader = HeartbeatReader(tmp_path / "beat")
    assert not reader.is_stuck(1e9)  # no file yet
    beat = Heartbeat(tmp_path / "beat", expected_s=0.01)
    assert not reader.is_stuck(1e9)  # idle
    beat.begin(100.0)
    assert not reader.is_stuck(109.9)
    assert reader.is_stuck(110.1)
    beat.end(110.2)
    assert reader.is_stuck(213.0)  # the work after the step has a deadline too


def test_idle_core_must_renew_its_heartbeat_in_time(tmp_path: Path) -> None:
    """Slow steps before do not extend the deadline of an idle core."""
    beat, reader = Heartbeat(tmp_path / "beat", 60.0), HeartbeatReader(tmp_path / "beat")
    beat.begin(0.0)
    beat.end(50.0)
    beat.wait(100.0, 1.0)
    assert not reader.is_stuck(101.0 + MIN_LIMIT_S)
    assert reader.is_stuck(101.1 + MIN_LIMIT_S)
    beat.wait(112.0, 1.0)
    assert not reader.is_stuck(112.0)


def test_one_missed_deadline_is_not_enough(tmp_path: Path) -> None:
    """After the machine was suspended, the watch may wake up before the core does."""
    beat, watch = Heartbeat(tmp_path / "beat", 0.0), StuckWatch(HeartbeatReader(tmp_path / "beat"))
    beat.wait(0.0, 1.0)
    assert not watch.is_stuck(500.0)
    beat.wait(500.5, 1.0)
    assert not watch.is_stuck(501.0)
    assert not watch.is_stuck(600.0)
    assert not watch.is_stuck(600.5)
    assert watch.is_stuck(601.0)
    watch.forget()
    Heartbeat(tmp_path / "beat", 0.0).wait(0.0, 1.0)
    assert not watch.is_stuck(601.5)  # the file of another core


def test_first_step_time_is_estimated_from_model_and_compilation() -> None:
    config = config_from_flat(max_num_batched_tokens=1000)
    assert expected_step_s(config, "cpu", 1 << 30) == pytest.approx(107, rel=0.01)
    assert expected_step_s(config, "cuda", 1 << 30) == pytest.approx(0.107, rel=0.01)
    compiled = config_from_flat(max_num_batched_tokens=1000, torch_compile=True)
    assert expected_step_s(compiled, "cuda", 1 << 30) > 60.0


def test_slow_steps_extend_the_limit_to_ten_times_their_time(tmp_path: Path) -> None:
    beat, reader = Heartbeat(tmp_path / "beat", 0.0), HeartbeatReader(tmp_path / "beat")
    beat.begin(0.0)
    beat.end(7.0)
    beat.begin(100.0)
    assert not reader.is_stuck(169.0)
    assert reader.is_stuck(171.0)


def test_extended_phase_has_its_own_limit(tmp_path: Path) -> None:
    """Steps continue within the phase. A slow one does not change later limits."""
    beat, reader = Heartbeat(tmp_path / "beat", 0.0), HeartbeatReader(tmp_path / "beat")
    beat.begin(0.0)
    beat.extend(9.0, 300.0)
    assert not reader.is_stuck(308.0)
    assert reader.is_stuck(310.0)
    beat.end(200.0)
    beat.wait(201.0, 1.0)
    beat.begin(400.0)
    assert not reader.is_stuck(699.0)
    beat.extend(700.0)
    assert not reader.is_stuck(709.0)
    assert reader.is_stuck(711.0)


def test_limit_decays_after_a_slow_step(tmp_path: Path) -> None:
    beat, reader = Heartbeat(tmp_path / "beat", 0.0), HeartbeatReader(tmp_path / "beat")
    beat.begin(0.0)
    beat.end(7.0)
    for now in range(1000, 11_000):
        beat.begin(float(now))
        beat.end(now + 0.01)
    beat.begin(20_000.0)
    assert reader.is_stuck(20_010.5)


def test_expected_time_applies_until_steps_are_measured(tmp_path: Path) -> None:
    beat, reader = Heartbeat(tmp_path / "beat", 5.0), HeartbeatReader(tmp_path / "beat")
    beat.begin(0.5)
    assert not reader.is_stuck(50.0)
    assert reader.is_stuck(51.0)


def test_reader_follows_the_file_of_a_new_core(tmp_path: Path) -> None:
    reader = HeartbeatReader(tmp_path / "beat")
    Heartbeat(tmp_path / "beat", 0.0).begin(1.0)
    assert reader.is_stuck(50.0)
    reader.forget()
    assert not reader.is_stuck(50.0)
    Heartbeat(tmp_path / "beat", 0.0)
    assert not reader.is_stuck(50.0)


def test_each_part_of_a_repeated_step_renews_the_heartbeat(tmp_path: Path) -> None:
    clock, reader = FakeClock(), HeartbeatReader(tmp_path / "beat")
    beat = Heartbeat(tmp_path / "beat", 0.0)
    _, inner = dry_run(8, 4, SchedulerConfig(4, 16), 32, False)
    executor = BeatingExecutor(inner, beat, clock)
    beat.begin(clock.now())
    for _ in range(5):
        clock.advance(9.0)
        assert not reader.is_stuck(clock.now())
        executor.submit(Plan(0))
        executor.next_result()
    clock.advance(10.5)
    assert reader.is_stuck(clock.now())


@pytest.mark.parametrize("size", [0, 8])
def test_incomplete_file_is_ignored(tmp_path: Path, size: int) -> None:
    (tmp_path / "beat").write_bytes(bytes(size))
    assert not HeartbeatReader(tmp_path / "beat").is_stuck(1.0)
