"""The plan of half an hour on a GPU, tested without one: its calls, and recorded passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import check, passed
from benchmarks.gpu.check import Check, main, parser
from benchmarks.gpu.passed import Passed
from benchmarks.gpu.pieces import chosen
from benchmarks.gpu.plan import CHANGED, MAX_CALL_S, OTHERS, PLANS, Stage
from tests.benchmarks.test_gpu_check import fake_python, names_in

ROOT = Path(__file__).parents[2]
CALLS = PLANS["30min"]
# The pieces of the plan in order; no call depends on another one.
PIECES = (
    "limits llama-8b qwen3-0.6b", "limits modes host guesses quantised qwen3-30b-a3b kernels",
    "limits attention paged", "rivals quire-8b generate-8b quire generate",
)  # fmt: skip
KERNELS = ["tests/kernels/test_gate.py", "tests/kernels/test_norm.py"]


def test_four_calls_fit_and_run_changed_tests_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each call leaves time for writing its results, and all together for starts and transfers.
    Each benchmark of the device is in a call."""
    assert all(call.budget_s <= MAX_CALL_S - 30 for call in CALLS) and len(CALLS) == 4
    assert sum(call.budget_s for call in CALLS) <= 27.5 * 60
    planned = {name for call in CALLS for stage in call.stages for name in stage.pieces.split()}
    assert {piece.name for piece in chosen("bench")} <= planned
    stages = [stage for call in CALLS for stage in call.stages]
    order = [stage.name for stage in stages]
    assert order[:4] == ["kernels-changed", "models-changed", "kernels-others", "first"]
    assert "bench" not in order[:4] and order[-1] == "tools"
    assert tuple(stage.pieces for stage in stages if stage.pieces) == PIECES
    for stage in stages:
        if stage.part in ("first", "bench", "peers"):
            assert chosen(stage.part, stage.pieces)
    assert main(["--plan", "30min", "--dry"]) == 0
    printed = capsys.readouterr().out
    commands = re.findall(r"^PLAN=30min CALL=(\d) bash \.ci/gpu-check", printed, re.MULTILINE)
    assert commands == ["1", "2", "3", "4"] and all(name in printed for name in PIECES)
    assert main(["--plan", "30min", "--call", "5"]) == 2


def test_test_counts_as_changed_if_its_device_sources_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of ops counts even if a function imports it, or only names it. Modules of serve and
    their own imports do not count."""
    files = {
        "tests/kernels/test_norm.py": "import quire.serve.one\nfrom quire.ops import norms\n",
        "src/quire/serve/one.py": "",
        "src/quire/ops/norms.py": "def norm(x):\n    return kernels_for(x, 'norm')\n",
        "src/quire/ops/kernels/norm.py": "",
        "src/quire/ops/gate.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(passed, "ROOT", tmp_path)
    monkeypatch.setattr(passed, "ROOTS", {"quire": tmp_path / "src", "tests": tmp_path})
    [test, *others], paths = files, (tmp_path / "a.json", tmp_path / "b.json")
    assert Passed("H200", paths).has_changed(test)
    paths[1].write_text("{half")
    Passed("H200", paths).add(test, 3)
    found = {}
    for name in others:
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "# changed\n")
        found[Path(name).name] = Passed("H200", paths).has_changed(test)
        (tmp_path / name).write_text(before)
        assert not Passed("H200", paths[1:]).has_changed(test)
    assert found == {"one.py": False, "norms.py": True, "norm.py": True, "gate.py": False}
    assert Passed("H100", paths).has_changed(test)


def test_passed_tests_are_recorded_and_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two files fails. The next call runs it first, and the other one after it."""
    monkeypatch.setattr(check, "FILE", tmp_path / "passed.json")
    monkeypatch.setattr(Check, "_test_files", lambda self, part: KERNELS)
    outcome = 'case "$*" in *gate*) echo "E   wrong"; exit 1 ;; *) echo "37 passed in 1.0s" ;; esac'
    python = fake_python(tmp_path / "python", "true", outcome)
    options = parser().parse_args(["kernels", f"--python={python}", "--jobs=1"])

    def run(only: str) -> tuple[int, list[str]]:
        stage = Stage("kernels", 60, only=only)
        done = Check("kernels", options, tmp_path / "call-1", tmp_path / "out", stage=stage)
        return done.run(), [each.task.name for each in done.outcomes]

    assert run(CHANGED) == (1, ["gate", "norm"])
    assert run(CHANGED) == (1, ["gate"])
    assert run(OTHERS) == (0, ["norm"])
    [record] = passed.read(tmp_path / "passed.json").values()
    assert [entry["passed"] for entry in record.values()] == [37]
    assert "call-1/passed.json" in names_in(tmp_path / "out" / "gpu-check-call-1.tar.gz")


def test_missing_tools_are_skipped(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", "true", "true")
    options = parser().parse_args(["tools", f"--python={python}"])
    done = Check("tools", options, tmp_path / "results", tmp_path / "out")
    assert done.run() == 0 and not done.outcomes
    assert "memcheck: compute-sanitizer is not installed" in done.text
    assert "ncu-attention: ncu is not installed" in done.text


@pytest.mark.slow
def test_last_call_runs_on_this_cpu(tmp_path: Path) -> None:
    """It uses tiny models for attention, rivals, peers and the commands for the tools."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "DEVICE": "cpu"}
    environment |= {"PLAN": "30min", "CALL": "4"}
    done = subprocess.run(
        ["bash", ".ci/gpu-check", "--results", str(tmp_path / "results")],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== gpu-check") == 3
    names = names_in(tmp_path / "gpu-check-call-4.tar.gz")
    assert {"call-4/gpu_peers.rivals.json", "call-4/tools/memcheck.txt"} <= set(names)
