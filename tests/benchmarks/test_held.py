"""Engines limited to AVX2: stopping and resuming, repeated measurements of peers, and the table."""

import argparse
import time
from pathlib import Path

import pytest

from benchmarks.cpu.engines import ENGINES, LLAMA, Engine
from benchmarks.cpu.held.__main__ import DEFAULT_ENGINES, HeldSession
from benchmarks.cpu.held.instructions import LLAMA_AVX2, VARIABLES, held
from benchmarks.cpu.held.journal import Journal
from benchmarks.cpu.held.report import cells_of, lines_of, wide_lines
from benchmarks.cpu.limits import Ceilings
from benchmarks.cpu.noise import AVX512_THREADS, avx512_threads
from benchmarks.cpu.preparation import Scratch, Unavailable
from benchmarks.cpu.processes import Run
from benchmarks.cpu.workloads import SHORT, WORKLOADS, Workload, chosen_workload

CEILINGS = Ceilings(38.5e9, 200e9, 200e9, 405e9)
BATCH = chosen_workload("batch", is_small=False, is_short=True)
ENGINES_8 = [e for e in held(ENGINES) if e.name in DEFAULT_ENGINES and e.category == "8-bit"]


def batch_run(engine: str, rate: float, round_: int = 0, others: float = 0.0, wide: int = 0) -> Run:
    metrics = {"batch_rate": rate, AVX512_THREADS: float(wide)}
    return Run(engine, "batch", round_, metrics, others)


class FakeSession(HeldSession):
    """A session with fixed rates by engine; engines without a rate are unavailable."""

    rates: dict[str, float]

    def observed(self, engine: Engine, workload: Workload, round_: int) -> list[Run]:
        if engine.name not in self.rates:
            raise Unavailable("does not start")
        return [batch_run(engine.name, self.rates[engine.name], round_)]


def session(path: Path, rates: dict[str, float], minutes: float = 1.0) -> FakeSession:
    options = argparse.Namespace(tries=2, threads=2)
    journal = Journal(path / "journal.jsonl", {"cpu": "this"})
    journal.open()
    until_s = time.monotonic() + 60 * minutes
    found = FakeSession(options, Scratch(path), journal=journal, until_s=until_s)
    found.rates = rates
    return found


def measured(path: Path, rates: dict[str, float], rounds: int) -> set[tuple[str, int]]:
    """Measure, and return the processes in the journal by engine and round."""
    found = session(path, rates)
    for round_ in range(rounds):
        for engine in ENGINES_8:
            found.measure(engine, BATCH, round_)
    return {(name, round_) for name, _, round_ in found.journal.done}


RATES = {"quire int8": 50.0, "llama.cpp q8_0": 40.0, "openvino int8": 31.0, "ctranslate2 int8": 29}


def test_slow_peers_are_measured_once_and_our_engines_always(tmp_path: Path) -> None:
    found = measured(tmp_path, RATES, 3)
    assert {name for name, round_ in found if round_ == 2} == {
        "quire int8", "llama.cpp q8_0", "openvino int8"
    }  # fmt: skip
    assert ("ctranslate2 int8", 0) in found and ("ctranslate2 int8", 1) not in found
    slow = RATES | {"quire int8": 1.0}
    assert ("quire int8", 2) in measured(tmp_path / "slow", slow, 3)


def test_comparison_resumes_after_the_last_complete_process(tmp_path: Path) -> None:
    first = measured(tmp_path, RATES, 1)
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"key": ["quire int8", "ba')  # killed within a line
    found = session(tmp_path, {})  # no engine may run again
    for engine in ENGINES_8:
        found.measure(engine, BATCH, 0)
    assert {(name, round_) for name, _, round_ in found.journal.done} == first
    assert not found.failures
    assert found.journal.runs()[0].metrics["batch_rate"] in RATES.values()


def test_failures_are_journalled_and_not_retried(tmp_path: Path) -> None:
    measured(tmp_path, {}, 1)
    assert not measured(tmp_path, RATES, 1)
    found = session(tmp_path, RATES).journal.failures
    assert found["quire int8: batch"] == "does not start"


def test_ceilings_are_journalled(tmp_path: Path) -> None:
    session(tmp_path, {}).journal.add_ceilings({"2": {"read": 1e9}})
    assert session(tmp_path, {}).journal.ceilings == {"2": {"read": 1e9}}


def test_journal_of_another_machine_is_refused(tmp_path: Path) -> None:
    session(tmp_path, {})
    with pytest.raises(SystemExit, match="another file with --journal"):
        Journal(tmp_path / "journal.jsonl", {"cpu": "other"}).open()


def test_time_limit_stops_before_the_next_process(tmp_path: Path) -> None:
    found = session(tmp_path, RATES, minutes=-1)
    with pytest.raises(KeyboardInterrupt):
        found.measure(ENGINES_8[0], BATCH, 0)
    assert not found.journal.done


def test_table_shows_medians_spread_and_gain_over_the_best_peer() -> None:
    runs = [batch_run("quire int8", rate) for rate in (50, 60, 55)]
    runs += [batch_run("quire int8", 5, others=0.5)]  # disturbed
    runs += [batch_run("openvino int8", rate) for rate in (40, 50, 44)]
    runs += [batch_run("llama.cpp q8_0", 30, others=0.5, wide=1)]
    cells = {cell.engine: cell for cell in cells_of(runs, ENGINES_8, CEILINGS)}
    ours = cells["quire int8"]
    assert (ours.median, min(ours.values), max(ours.values)) == (55, 50, 60)
    assert (ours.gain, ours.peer) == (55 / 44, "openvino int8")
    assert 0.1 < (ours.share or 0) < 1
    row = ours.row()
    assert (row["ratio"], row["runs"], row["is_quiet"]) == (55 / 44, [50, 60, 55], True)
    assert not cells["llama.cpp q8_0"].is_quiet
    lines = lines_of(cells.values())
    assert "  1.25 openvino int8" in next(line for line in lines if "quire int8" in line)
    assert any("~llama.cpp q8_0" in line for line in lines)
    assert wide_lines(runs) == ["AVX-512 registers: llama.cpp q8_0: batch"]
    assert wide_lines(runs[:3]) == ["no thread of any engine used AVX-512 registers"]


def test_engines_are_limited_by_builds_and_variables() -> None:
    environments = {engine.environment for engine in held(ENGINES)}
    assert LLAMA_AVX2 in environments and LLAMA not in environments
    assert "-DGGML_AVX512=OFF" in dict(LLAMA_AVX2.variables)["CMAKE_ARGS"]
    (openvino,) = [engine for engine in held(ENGINES) if engine.name == "openvino fp16"]
    assert openvino.options == {"INFERENCE_PRECISION_HINT": "f32"}
    assert VARIABLES["QUIRE_CPU_VARIANT"] == "avx2"
    assert {engine.name for engine in ENGINES} >= set(DEFAULT_ENGINES)


def test_short_workloads_are_the_full_ones_with_fewer_tokens() -> None:
    whole = {workload.name: workload for workload in WORKLOADS}
    assert {work.name for work in SHORT} == set(whole) - {"start"}
    assert all(work.num_tokens <= whole[work.name].num_tokens for work in SHORT)


def test_threads_with_avx512_registers_are_counted(tmp_path: Path) -> None:
    """A value of -1 means never. A thread that has ended has no file."""
    for number, text in enumerate(("AVX512_elapsed_ms:\t-1", "AVX512_elapsed_ms:\t8", None)):
        (tmp_path / str(number)).mkdir()
        if text is not None:
            (tmp_path / str(number) / "arch_status").write_text(f"{text}\n")
    assert [avx512_threads(seconds, tmp_path) for seconds in (1.0, 0.007)] == [1, 0]
