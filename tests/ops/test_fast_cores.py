"""Performance cores: their choice on fake topologies, and pinning a thread to them."""

import os
from pathlib import Path

import pytest

from quire.ops.host import fast_cores, threads
from quire.ops.host.fast_cores import core_speeds, measured_speed, stay_on_fast_cores
from quire.ops.host.native import core

KHZ = "cpufreq/cpuinfo_max_freq"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*threads.VARIABLES, fast_cores.ALL_CORES):
        monkeypatch.delenv(name, raising=False)


def fake(
    monkeypatch: pytest.MonkeyPatch, path: Path, figures: list[int], pairs: int = 0, name: str = KHZ
) -> None:
    """Fake a topology. pairs: the number of first cores that have two logical processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(figures))))
    for cpu, figure in enumerate(figures):
        place = path / f"cpu{cpu}"
        (place / "topology").mkdir(parents=True)
        names = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 2 * pairs else str(cpu)
        (place / "topology/thread_siblings_list").write_text(names)
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(f"{figure}\n")


@pytest.mark.parametrize("name", fast_cores.FIGURES)
def test_fast_cores_with_all_their_threads_are_chosen_by_speed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, tmp_path, [5000, 5000, 5100, 5100, 3800, 3800], pairs=2, name=name)
    seen: list[int] = []
    speeds = {0: 100e9, 2: 99e9, 4: 40e9, 5: 41e9}

    def measure(cpu: int) -> float:
        seen.append(cpu)
        return speeds[cpu]

    found = core_speeds(tmp_path, measure)
    assert (found.cpus, dict(found.speeds)) == ({0, 1, 2, 3}, speeds)
    assert seen == [0, 2, 4, 5]
    assert found.reason == "2 of 4 cores, with 71% of the speed"


@pytest.mark.parametrize(
    ("speeds", "reason"),
    [
        ([100.0, 60, 60, 60], "the 1 fast ones have 36% of the speed"),
        ([100.0, 90, 80, 78], "about equally fast"),
        ([100.0, 40, 40, 0], "could not be measured"),
    ],
)
def test_all_cores_are_used_unless_some_are_measured_much_faster(
    speeds: list[float], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux's figures only decide whether to measure."""
    fake(monkeypatch, tmp_path, [5000, 3800, 3800, 3800])
    found = core_speeds(tmp_path, lambda cpu: speeds[cpu])
    assert not found.cpus
    assert reason in found.reason


def fail_if_measured(cpu: int) -> float:
    raise AssertionError(f"processor {cpu} was measured")


@pytest.mark.parametrize("figures", [[], [5000], [5000, 5000], [5100, 5000, 4800, 4700]])
def test_equal_or_unknown_cores_are_not_measured(
    figures: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, tmp_path, figures)
    found = core_speeds(tmp_path, fail_if_measured)
    assert found == fast_cores.CoreSpeeds("all cores: Linux's figures show no difference")


@pytest.mark.parametrize("name", [fast_cores.ALL_CORES, *threads.VARIABLES])
def test_environment_variables_disable_the_choice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, tmp_path, [5000, 3000])
    monkeypatch.setenv(name, "1")
    assert not core_speeds(tmp_path, fail_if_measured).cpus


def test_thread_is_pinned_to_the_chosen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fast_cores.CoreSpeeds("1 of 2 cores", {0: 2.0, 1: 1.0}, frozenset({0, 7}))
    monkeypatch.setattr(fast_cores, "core_speeds", lambda: found)
    calls = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *given: calls.append(given))
    assert stay_on_fast_cores() is found
    assert calls == [(0, {0, 7})]


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_measurement_keeps_the_callers_affinity() -> None:
    before = os.sched_getaffinity(0)
    assert measured_speed(min(before)) > 1e6
    assert os.sched_getaffinity(0) == before
    assert measured_speed(1 << 14) == 0  # no such processor
