"""The GPU benchmarks without a GPU: their arithmetic, and a run of the driver on this CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import kernels
from benchmarks.gpu.attention import Shape
from benchmarks.gpu.floors import (
    H200,
    Cost,
    Limits,
    Weights,
    decode_cost,
    run_floor_s,
    seen_pairs,
    step_cost,
)
from benchmarks.gpu.pieces import PIECES, chosen
from quire.models.checkpoint.source import resolve_model
from quire.spec.model_spec import ModelSpec, load_spec

ROOT = Path(__file__).parents[2]
LLAMA, SMALL = "llama-3.1-8b", "qwen3-0.6b"


def spec_of(name: str) -> ModelSpec:
    return load_spec(resolve_model(f"shape:{name}").directory)


def test_decode_floors_equal_the_documented_figures() -> None:
    """The aims are based on these figures."""
    for model, batch, context, expected_ms in (
        (LLAMA, 1, 512, 3.51),
        (LLAMA, 256, 2048, 20.9),
        (SMALL, 1, 512, 0.29),
    ):
        found_ms = decode_cost(spec_of(model), batch, context).lower_bound_s(H200) * 1e3
        assert found_ms == pytest.approx(expected_ms, rel=0.01), (model, batch, context)
    prompt = step_cost(spec_of(LLAMA), [(2048, 2048)])  # the head multiplies one token
    assert prompt.lower_bound_s(H200) * 1e3 == pytest.approx(37.6, rel=0.01)
    mixture = Weights(layers=9, head=5, experts=1280, num_chosen=8, num_experts=128)
    assert mixture.multiplied(3, 1) == 3 * (9 + 80) + 5
    assert mixture.read(32) == pytest.approx(9 + 5 + 0.873 * 1280, rel=0.001)


def test_floor_of_a_run_is_the_sum_of_its_steps() -> None:
    """The prompt's step gives the first token of a request."""
    spec, lengths = spec_of(SMALL), [(5, 3), (9, 1), (2, 6), (4, 3)]
    total = step_cost(spec, [(prompt, prompt) for prompt, _ in lengths]).lower_bound_s(H200)
    for step in range(1, 6):
        rows = [(prompt + step, 1) for prompt, output in lengths if output > step]
        total += step_cost(spec, rows).lower_bound_s(H200)
    assert run_floor_s(spec, lengths, H200) == pytest.approx(total, rel=1e-6)


def test_attention_costs_count_visible_pairs() -> None:
    seen = sum(position + 1 for position in range(7, 10))
    assert seen_pairs(10, 3) == seen
    cost = Shape(num_heads=4, num_kv_heads=2, head_dim=16).cost([(10, 3), (6, 1)], itemsize=2)
    assert cost.flops == 4 * (seen + 6) * 4 * 16
    assert cost.num_bytes == 2 * 16 * 2 * 16 * 2 + 2 * 4 * 4 * 16 * 2
    limits = Limits(100.0, 1000.0)
    assert Cost(num_bytes=200, flops=1000, kv_bytes=50, kv_flops=2000).lower_bound_s(limits) == 4.0


def test_each_kernel_has_a_case_and_all_pieces_fit_the_time() -> None:
    folder = ROOT / "src" / "quire" / "ops" / "kernels"
    modules = {path.stem for path in folder.rglob("*.py")} - {"__init__"}
    covered = {case.module for case in kernels.cases(is_tiny=False)}
    missing = modules - covered - kernels.ELSEWHERE.keys()
    assert not missing, f"benchmarks/gpu/kernels.py has no case for {missing}"
    assert covered == {case.module for case in kernels.cases(is_tiny=True)} <= modules
    assert all(callable(piece.load()) for piece in PIECES)
    assert sum(piece.limit_s for piece in [*chosen("first"), *chosen("bench", "limits")]) <= 440
    limits = [piece.limit_s for piece in chosen("bench")]
    assert sum(limits[:4]) <= 480 and sum(limits[4:]) <= 480, "two commands of 480 s suffice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "names"), [("bench", "qwen3-0.6b paged kernels"), ("peers", "quire transformers vllm")]
)
def test_tiny_run_executes_each_piece(part: str, names: str, tmp_path: Path) -> None:
    """Each piece runs in its own process. Limits run first automatically; absent engines are
    skipped."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--pieces", names]
    command += ["--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    pieces = json.loads((tmp_path / f"gpu_{part}.json").read_text())["pieces"]
    assert [each["piece"] for each in pieces] == ["limits", *names.split()]
    rows = [row for piece in pieces[1:] for row in piece["rows"]]
    if part == "bench":
        assert all(row["floor_s"] and row["measured_floor_s"] for row in rows)
        assert len(pieces[3]["rows"]) == len(list(kernels.cases(is_tiny=True)))
    else:
        rates = [piece["facts"]["rates"].keys() for piece in pieces[1:3]]
        assert rows and rates[0] == rates[1]
