"""The GPU benchmarks without a GPU: their arithmetic, and that every piece runs on a tiny model."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import kernels
from benchmarks.gpu.attention import BLOCK_SIZE, Shape, paged_step
from benchmarks.gpu.context import Bench, OutOfTime, repeats_for
from benchmarks.gpu.engine import Done, StepLog, decode_lengths, steady_times
from benchmarks.gpu.floors import (
    H200,
    Cost,
    Limits,
    decode_cost,
    run_floor_s,
    seen_pairs,
    step_cost,
    weights_of,
)
from benchmarks.gpu.idle import Interval, idle_of, intervals_of, largest_kernels
from benchmarks.gpu.peers import check_counts, comparison
from benchmarks.gpu.pieces import PIECES, chosen
from benchmarks.gpu.report import (
    Report,
    Row,
    duration,
    markdown,
    read_piece,
    summary,
    timed_row,
)
from benchmarks.gpu.table import PROFILED_STEPS, idle_row
from benchmarks.gpu.workload import Request, random_requests
from quire.base.events import Planned, Stepped
from quire.base.model_spec import ModelSpec, load_spec
from quire.models.source import resolve_model

ROOT = Path(__file__).parents[2]
LLAMA, SMALL, MIXTURE = "llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b"


def spec_of(name: str) -> ModelSpec:
    return load_spec(resolve_model(f"shape:{name}").directory)


@pytest.mark.parametrize(
    ("model", "batch", "context", "wanted_ms"),
    [
        (LLAMA, 1, 512, 3.51),
        (LLAMA, 32, 512, 3.99),
        (LLAMA, 128, 512, 5.49),
        (LLAMA, 256, 512, 8.86),
        (LLAMA, 256, 2048, 20.9),
        (SMALL, 1, 512, 0.29),
        (MIXTURE, 32, 512, 12.7),
    ],
)
def test_floors_of_decoding(model: str, batch: int, context: int, wanted_ms: float) -> None:
    """The figures that the aims were set with."""
    found_ms = decode_cost(spec_of(model), batch, context).least_s(H200) * 1e3
    assert found_ms == pytest.approx(wanted_ms, rel=0.01)


def test_floor_of_a_prompt() -> None:
    """Products bind, attention comes behind them, and the head multiplies one token."""
    cost = step_cost(spec_of(LLAMA), [(2048, 2048)])
    assert cost.least_s(H200) * 1e3 == pytest.approx(37.6, rel=0.01)
    parts = step_cost(spec_of(LLAMA), [(1024, 1024), (2048, 1024)])
    assert parts.kv_flops == cost.kv_flops
    assert parts.flops == cost.flops + 2 * weights_of(spec_of(LLAMA)).head


def test_parameters() -> None:
    """Of Llama-3.1-8B 8.03 G with the embedding, which no step reads whole; of the mixture 3.3 G
    are active."""
    weights, spec = weights_of(spec_of(LLAMA)), spec_of(LLAMA)
    assert weights.layers + 2 * weights.head == pytest.approx(8.03e9, rel=1e-3)
    assert weights.head == spec.vocab_size * spec.hidden_size
    mixture = weights_of(spec_of(MIXTURE))
    active = mixture.multiplied(1, 1) + mixture.head  # the embedding is as large
    assert active == pytest.approx(3.35e9, rel=0.01)
    assert mixture.share_of_experts_hit(1) == pytest.approx(8 / 128)
    assert mixture.share_of_experts_hit(32) == pytest.approx(0.873, abs=0.001)
    assert mixture.read(10_000) == pytest.approx(mixture.layers + mixture.head + mixture.experts)


def test_floor_of_a_run_is_that_of_its_steps() -> None:
    """Against steps that are counted one by one; a request's first token is its prompt's."""
    spec, lengths = spec_of(SMALL), [(5, 3), (9, 1), (2, 6), (4, 3)]
    total = step_cost(spec, [(prompt, prompt) for prompt, _ in lengths]).least_s(H200)
    for step in range(1, 6):
        rows = [(prompt + step, 1) for prompt, output in lengths if output > step]
        total += step_cost(spec, rows).least_s(H200)
    assert run_floor_s(spec, lengths, H200) == pytest.approx(total, rel=1e-6)


def test_pairs_and_costs() -> None:
    seen = sum(position + 1 for position in range(7, 10))
    assert seen_pairs(10, 3) == seen
    cost = Shape(num_heads=4, num_kv_heads=2, head_dim=16).cost([(10, 3), (6, 1)], itemsize=2)
    assert cost.flops == 4 * (seen + 6) * 4 * 16
    assert cost.num_bytes == 2 * 16 * 2 * 16 * 2 + 2 * 4 * 4 * 16 * 2
    limits = Limits(100.0, 1000.0)
    assert Cost(num_bytes=200, flops=1000, kv_bytes=50, kv_flops=2000).least_s(limits) == 4.0


def test_blocks_of_a_step_are_used_once() -> None:
    step, num_blocks = paged_step([(40, 1), (33, 33), (16, 2)], torch.device("cpu"))
    tables = step.block_tables_SL[0]
    used = torch.cat([tables[0, :3], tables[1, :3], tables[2, :1]])
    assert num_blocks == 7 and sorted(used.tolist()) == list(range(7))
    assert used.tolist() != list(range(7))
    slots = step.slots_T[0]
    assert slots[0] == tables[0, 2] * BLOCK_SIZE + 39 % BLOCK_SIZE
    assert len(slots.unique()) == 36 and step.query_starts_S1.tolist() == [0, 1, 34, 36]


def test_idle_share_of_overlapping_work() -> None:
    """Two streams: what overlaps is busy once, what is inside another adds nothing."""
    work = [Interval(0.0, 2.0, "a"), Interval(1.0, 3.0, "b"), Interval(1.5, 1.6, "c")]
    work += [Interval(4.0, 5.0, "d"), Interval(5.0, 6.0, "e"), Interval(6.5, 7.0, "f")]
    found = idle_of(reversed(work))
    assert found.span_s == 7.0 and found.busy_s == pytest.approx(5.5)
    assert found.share == pytest.approx(1.5 / 7.0)
    assert [(gap.before, gap.after) for gap in found.gaps] == [("b", "d"), ("e", "f")]
    assert largest_kernels([*work, Interval(8, 10, "c")], 1) == [("c", pytest.approx(2.1))]
    with pytest.raises(ValueError, match="no work"):
        idle_of([])


def test_work_in_a_trace() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "ts": 1.0, "dur": 2.0, "name": "k"},
        {"ph": "X", "cat": "gpu_memcpy", "ts": "4", "dur": 1, "name": "copy"},
        {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9, "name": "aten::mm"},
        {"ph": "f", "cat": "kernel", "ts": 0, "name": "flow"},
    ]
    found = intervals_of({"traceEvents": events})
    assert [interval.name for interval in found] == ["k", "copy"]
    assert found[0].end == pytest.approx(3e-6)


def test_idle_against_steps_without_the_profiler() -> None:
    """The profiler makes the host slower: what it adds to the gaps is not the engine's."""
    step = Interval(0, 0.8e-3), Interval(1e-3, 1.8e-3)
    found = idle_of(
        Interval(n * 2e-3 + each.begin, n * 2e-3 + each.end) for n in range(25) for each in step
    )
    assert found.share == pytest.approx(0.2, abs=0.01) and PROFILED_STEPS == 50
    assert idle_row("x", found, 0.1, None).is_reached is False
    assert idle_row("x", found, 0.1, 0.82e-3).is_reached is True
    assert idle_row("x", found, 0.1, 1.2e-3).is_reached is False


def test_steady_steps_are_those_of_all_rows() -> None:
    """Prompts before and rows that end behind do not count, nor what is compiled at first."""
    prompts = [Done(0.1 * n, 1, 40) for n in range(3)]
    steady = [Done(1.0, 2, 2), Done(5.0, 2, 2), *(Done(6.0 + 0.5 * n, 2, 2) for n in range(5))]
    ending = [Done(9.0 + n, 1, 1) for n in range(20)]
    found = steady_times([*prompts, *steady, *ending], batch=2, skip=2)
    assert found.mean_s == pytest.approx(0.5) and found.num_steps == 4
    late = [*steady[:-1], Done(9.0, 2, 2)]
    found = steady_times(late, batch=2, skip=2)
    assert found.median_s == 0.5 and found.longest_s == 1.5 and found.mean_s == pytest.approx(0.75)
    with pytest.raises(ValueError, match="of 2 rows"):
        steady_times(prompts, batch=2)


def test_rows_decode_together_for_long_enough() -> None:
    """By stepping: decoding rows first, the rest of the budget for prompts."""
    batch, context, steps, budget = 24, 100, 20, 256
    prompt, output = decode_lengths(batch, context, steps, budget)
    left, made, together, seen = [prompt] * batch, [0] * batch, 0, []
    while any(count < output for count in made):
        decoding = [i for i in range(batch) if left[i] == 0 and made[i] < output]
        room = budget - len(decoding)
        for i in range(batch):
            part = min(left[i], room)
            left[i] -= part
            room -= part
        if len(decoding) == batch:
            together += 1
            seen.append(prompt + sum(made) / batch)
        for i in range(batch):
            made[i] += left[i] == 0 and made[i] < output
    assert together >= 8 + steps
    middle = seen[8 : 8 + steps]
    assert sum(middle) / len(middle) == pytest.approx(context, abs=6)


def test_a_log_counts_results_only() -> None:
    log = StepLog(batch=2)
    rows = torch.arange(2, dtype=torch.int32).numpy()
    log(Planned(0.0, 1, 2, 2))
    log(Stepped(1.0, 1, rows, 2, 0.1))
    log(Stepped(2.0, 2, rows[:1], 9, 0.1))
    assert [done.num_tokens for done in log.steps] == [2, 9] and log.num_steady == 1


def test_rows_say_what_was_reached() -> None:
    cost = Cost(num_bytes=4.3e12)
    measured = Limits(4.0e12, 1e15)
    row = timed_row("x", 1.25, cost, measured, aim_s=1.3)
    assert row.share == pytest.approx(0.8) and row.measured_share == pytest.approx(0.86)
    assert row.is_reached is True and row.detail["GB/s"] == 3440.0
    assert timed_row("x", 1.25, cost, measured, least_share=0.88).is_reached is False
    assert timed_row("x", 1.25, cost, measured).is_reached is None
    cells = row.cells()
    assert cells[:7] == ("x", "1.25 s", "1 s", "80.0%", "1.07 s", "86.0%", "<= 1.3 s")
    assert [duration(value) for value in (0.0042, 3e-6, None)] == ["4.2 ms", "3 us", ""]


def test_markdown_has_failures_and_keeps_its_table() -> None:
    piece: dict[str, Any] = {"piece": "p", "rows": [vars(Row("a|b", 1.0, 0.5))], "skipped": ["c"]}
    piece["errors"] = [{"case": "d", "traceback": "Traceback\nValueError: no\n"}]
    text = markdown("T", {"gpu": "none"}, [piece])
    assert "| a/b | 1 s | 500 ms | 50.0% |" in text
    assert "- skipped c" in text and "- **failed** d: ValueError: no" in text


def test_what_to_look_at_first_comes_last() -> None:
    rows = [Row("a", 1.0, aim="<= 0.5 s", is_reached=False), Row("b", 1.0), Row("c", 2.0)]
    rows[2] = replace(rows[2], figure="2 x", aim="<= 3 x", is_reached=True)
    piece: dict[str, Any] = {"piece": "p", "rows": [vars(row) for row in rows], "skipped": ["d"]}
    piece["errors"] = [{"case": "e", "traceback": "Traceback\nValueError: no\n"}]
    piece["seconds"] = {"process": 3.21}
    assert summary([piece]) == [
        "p                   3.2 s, 3 rows, 1 failed, 1 skipped",
        "reached  p: c: 2 x, aim <= 3 x",
        "MISSED   p: a: 1 s, aim <= 0.5 s",
        "skipped  p: d",
        "FAILED   p: e: ValueError: no",
    ]


def test_results_outlive_errors_and_the_end_of_time(tmp_path: Path) -> None:
    report = Report("p", tmp_path / "p.json")
    bench = Bench(torch.device("cpu"), report, time.monotonic() + 60)
    assert bench.attempt("good", lambda: report.add(Row("good", 1.0)))
    assert not bench.attempt("bad", lambda: [][0])
    bench.until = time.monotonic() - 1
    with pytest.raises(OutOfTime):
        bench.attempt("late", lambda: report.add(Row("late", 1.0)))
    found = read_piece(report.path)
    assert found is not None and [row["case"] for row in found["rows"]] == ["good"]
    assert "IndexError" in found["errors"][0]["traceback"]
    assert found["skipped"] == ["late: the time is used up"]
    assert [repeats_for(each) for each in (1e-6, 0.01, 3.0)] == [50, 25, 5]


class FakeEvent:
    """Times that the device tells: those of a clock which the work moves."""

    clock_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.at_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.clock_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


class FakeGraph:
    """A graph whose replay does again what was called while it was captured."""

    captured: list[float] | None = None

    def __init__(self) -> None:
        self.work: list[float] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        FakeGraph.captured = self.work
        yield
        FakeGraph.captured = None

    def replay(self) -> None:
        FakeEvent.clock_ms += sum(self.work)


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """A bench that takes the CPU for a GPU, as far as timing goes."""
    monkeypatch.setattr(Bench, "is_cuda", True)
    monkeypatch.setattr("benchmarks.gpu.context.FLUSH_BYTES", 16)
    fakes = {"CUDAGraph": FakeGraph, "Event": FakeEvent, "graph": FakeGraph.capturing}
    fakes |= {"synchronize": lambda: None, "empty_cache": lambda: None}
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes |= {"Stream": lambda: stream, "current_stream": lambda: stream}
    fakes |= {"stream": lambda stream: nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Bench(torch.device("cpu"), Report("p", tmp_path / "p.json"), time.monotonic() + 60)


def launch(took_ms: float) -> None:
    if FakeGraph.captured is None:
        FakeEvent.clock_ms += took_ms
    else:
        FakeGraph.captured.append(took_ms)


def test_timing_by_graphs_and_without(gpu_bench: Bench) -> None:
    timing = gpu_bench.time(lambda: launch(2.0))
    assert timing.mode == "graph" and timing.detail == {"warm": "2000.0 us"}
    assert timing.cold_s == pytest.approx(2e-3) and timing.warm_s == pytest.approx(2e-3)

    def waits() -> None:
        if FakeGraph.captured is not None:
            FakeGraph.captured = None
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        launch(3.0)

    timing = gpu_bench.time(waits)
    assert timing.mode == "eager" and timing.cold_s == pytest.approx(3e-3)
    assert timing.detail["timed"].startswith("eager (RuntimeError: operation not permitted")


def test_a_lost_device_ends_the_piece(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal access is raised by every later call: what comes behind would only fail, too."""

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    assert not gpu_bench.attempt("wrong argument", lambda: [][0])
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu_bench.attempt("illegal", lost)
    assert [error["case"] for error in gpu_bench.report.errors] == ["wrong argument", "illegal"]


def test_a_profile_covers_steady_steps_only() -> None:
    calls: list[tuple[str, int]] = []
    log = StepLog(batch=1)
    log.profile = SimpleNamespace(  # type: ignore[assignment]
        start=lambda: calls.append(("start", log.num_steady)),
        stop=lambda: calls.append(("stop", log.num_steady)),
    )
    row = torch.zeros(1, dtype=torch.int32).numpy()
    for step in range(100):
        log(Stepped(float(step), step, row, 1 if step > 3 else 40, 0.1))
    assert calls == [("start", 8), ("stop", 8 + PROFILED_STEPS)]


def test_requests_are_the_same_for_all_engines() -> None:
    few, many = (random_requests(1000, num) for num in (8, 256))
    assert many[:8] == few and len({tuple(each.prompt) for each in many}) == 256
    lengths = [length for each in many for length in each.lengths]
    assert min(lengths) >= 100 and max(lengths) <= 1024 and 520 < sum(lengths) / 512 < 600
    assert max(max(each.prompt) for each in many) < 1000


def test_peers_must_make_all_tokens() -> None:
    requests = [Request([1], 2), Request([1], 3)]
    check_counts([[1, 2], [1, 2, 3]], requests)
    with pytest.raises(ValueError, match="4 tokens of 2 requests, 5 of 2 asked for; 1 have"):
        check_counts([[1, 2], [1, 2]], requests)
    with pytest.raises(ValueError, match="2 tokens of 1 requests"):
        check_counts([[1, 2]], requests)


def test_quire_stands_beside_the_fastest_other() -> None:
    ours = {"facts": {"rates": {"w": {"quire": 90.0, "quire, two": 100.0}}}}
    theirs = {"facts": {"rates": {"w": {"slow": 10.0, "a|b": 50.0}, "v": {"slow": 1.0}}}}
    lines = comparison([ours, theirs, {"facts": {}}])
    assert "| w | quire, two 100; quire 90; a/b 50; slow 10 | 2.00 x |" in lines
    assert "| v | slow 1 |  |" in lines
    assert comparison([{"facts": {}}]) == []


def test_every_kernel_module_has_a_case() -> None:
    folder = ROOT / "src" / "quire" / "ops" / "kernels"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    covered = {case.module for case in kernels.cases(is_tiny=False)}
    missing = modules - covered - kernels.ELSEWHERE.keys()
    assert not missing, f"benchmarks/gpu/kernels.py has no case for {missing}"
    assert covered == {case.module for case in kernels.cases(is_tiny=True)}
    assert not covered - modules


def test_pieces_are_chosen_by_name() -> None:
    assert [piece.name for piece in chosen("bench", "split, limits")] == ["limits", "split"]
    assert chosen("peers") == [piece for piece in PIECES if piece.part == "peers"]
    with pytest.raises(ValueError, match="no 'quire'; there are attention"):
        chosen("bench", "quire")
    for piece in PIECES:
        assert callable(piece.load())


def test_two_commands_have_time_for_all_of_bench() -> None:
    limits = [piece.limit_s for piece in chosen("bench")]
    assert sum(limits[:4]) <= 480 and sum(limits[4:]) <= 480


def test_a_piece_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as writers:
        hangs = f"(echo it writes; exec tail -f /dev/null) > {pipe} & wait"
        assert driver.run_for(["bash", "-c", hangs], 2.0) == "stopped"
        assert writers.read() == b"it writes\n"
        assert select.select([writers], [], [], 60.0)[0], "what it started still runs"
        assert writers.read() == b""  # the last writer has ended
    assert driver.run_for(["bash", "-c", "exit 3"], 60.0) == 3


def run_driver(out: Path, part: str, pieces: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The exit status and what was written, of a tiny run on this CPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--pieces", pieces]
    command += ["--device", "cpu", "--tiny", "--out", str(out), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (out / f"gpu_{part}.md").exists(), done.stdout + done.stderr
    whole: dict[str, Any] = json.loads((out / f"gpu_{part}.json").read_text())
    return done.returncode, {piece["piece"]: piece for piece in whole["pieces"]}


@pytest.mark.parametrize(
    "names", ["paged kernels", pytest.param("qwen3-0.6b paged kernels", marks=pytest.mark.slow)]
)
def test_bench_runs_piece_by_piece(names: str, tmp_path: Path) -> None:
    """Limits come first by themselves; nothing fails, and all have their limits beside them."""
    pytest.importorskip("triton")
    status, found = run_driver(tmp_path, "bench", names)
    errors = [error["traceback"] for piece in found.values() for error in piece["errors"]]
    assert not errors, errors[0]
    assert status == 0 and list(found) == ["limits", *names.split()]
    for name in names.split():
        assert found[name]["rows"]
        assert all(row["floor_s"] and row["measured_floor_s"] for row in found[name]["rows"])
    assert len(found["kernels"]["rows"]) == len(list(kernels.cases(is_tiny=True)))


def test_bench_stops_when_its_time_is_used_up(tmp_path: Path) -> None:
    status, found = run_driver(tmp_path, "bench", "limits split", "--budget-s", "0")
    assert status == 0 and not found["limits"]["rows"]
    assert found["split"]["skipped"] == ["split: the time is used up"]


@pytest.mark.slow
def test_peers_make_the_same_tokens(tmp_path: Path) -> None:
    """quire and transformers, each in its process; engines that are not there are skipped."""
    pytest.importorskip("transformers.generation.continuous_batching")
    status, found = run_driver(tmp_path, "peers", "quire transformers generate vllm")
    errors = [error["traceback"] for piece in found.values() for error in piece["errors"]]
    assert not errors and status == 0, errors
    rates = found["quire"]["facts"]["rates"]
    assert rates.keys() == found["transformers"]["facts"]["rates"].keys()
    assert found["generate"]["facts"]["rates"].keys() < rates.keys()
    assert "x |" in (tmp_path / "gpu_peers.md").read_text()
