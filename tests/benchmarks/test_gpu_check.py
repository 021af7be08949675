"""`.ci/gpu-check` without a GPU: tasks that fail, hang or print endlessly cost one line each."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import check, first, tasks
from benchmarks.gpu.check import Check, parser
from benchmarks.gpu.context import Bench
from benchmarks.gpu.first import Answer, answers
from benchmarks.gpu.report import Report
from benchmarks.gpu.results import line_of
from benchmarks.gpu.tasks import Outcome, Runner, Task
from quire.serve.python.llm import LLM
from tests import conftest

ROOT = Path(__file__).parents[2]
GPU = '{"torch": "2.11", "device": "H200, 139 GiB", "python": "3.12", "missing": []}'
FAKE = """#!/bin/bash
case "$*" in
    *importlib.util*) echo '{facts}' ;;
    *--collect-only*) {collect} ;;
    *) {test} ;;
esac
"""


def names_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return opened.getnames()


def fake_python(path: Path, collect: str, test: str) -> Path:
    path.write_text(FAKE.format(facts=GPU, collect=collect, test=test))
    path.chmod(0o755)
    return path


def test_each_failure_is_one_line_with_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "END_S", 0.1)
    monkeypatch.setattr(tasks, "MAX_LOG_BYTES", 1 << 20)
    failures = "E   AssertionError: not close!\\nE   more\\n2 failed, 3 passed in 4.20s"
    expected = {
        "echo fine": "right    .*: what it checks",
        f"echo -e '{failures}'; exit 1": "FAILED .*2 failed, 3 passed in 4.20s.*: not close!$",
        "echo 'Traceback'; echo 'ValueError: why'; echo bye; exit 1": "FAILED .* ValueError: why$",
        "echo before; kill -SEGV $$": f"FAILED .*ended by signal {signal.SIGSEGV}; before",
        "exit 3": "FAILED",
        "exit 5": "right",
        "trap '' INT; echo 'E   x'; sleep 1000 & wait; wait": "stopped after.* before that x",
        "yes": "printed over 1 MiB",
        "absent": "could not be started.*/no/such/python",
    }
    given = [
        Task(script, "what it checks", ("bash", "-c", script), 0.5 if "trap" in script else 60)
        for script in [*expected][:-1]
    ]
    found: list[Outcome] = []
    runner = Runner(tmp_path, time.monotonic() + 60, dict(os.environ), found.append)
    runner.run([*given, Task("absent", "", ("/no/such/python",))], 4)
    assert {each.task.name for each in found} == expected.keys()
    for each in found:
        line = line_of(each)
        assert re.search(expected[each.task.name], line) and "\n" not in line, line


def test_wrong_demo_answers_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second dtype's answers differ by 0.01 in one token, which rounding on a CPU does not
    explain."""
    num_calls = [0]

    def wrong_later(llm: LLM, prompts: list[str], num: int) -> list[Answer]:
        found = answers(llm, prompts, num)
        found[1].logprobs[3] += 0.01 * num_calls[0]
        num_calls[0] += 1
        return found

    monkeypatch.setattr(first, "answers", wrong_later)
    report = Report("demo-answers", tmp_path / "p.json")
    first.run_demo(Bench(torch.device("cpu"), report, time.monotonic() + 60, is_tiny=True))
    assert ["18 of 18 tokens the same" in row.figure for row in report.rows] == [True]
    [error] = report.errors
    assert "WRONG: 18 of 18 tokens the same, log p 0.01 apart" in error["traceback"]


def test_large_test_file_is_spread_over_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stand-in replaces Python. Each process runs one --shard of tests/conftest.py."""
    file = "tests/kernels/test_attention.py"
    collect = f'for i in $(seq 50); do echo "{file}::test_it[$i]"; done'
    fake = fake_python(tmp_path / "python", collect, 'echo "$@"')
    options = parser().parse_args(["kernels", f"--python={fake}", "--jobs=4", "--tests", file])
    check = Check("kernels", options, tmp_path / "results", tmp_path / "out")
    check.run()
    commands = [" ".join(each.task.command) for each in check.outcomes]
    assert sorted(command.split("--shard=")[1] for command in commands) == ["1/3", "2/3", "3/3"]
    printed = capfd.readouterr().out
    assert "paged attention with one softmax per row" in printed and "H200" in printed
    assert printed.endswith((tmp_path / "out" / "gpu-check.txt").read_text())
    assert "results/summary-kernels.txt" in names_in(tmp_path / "out" / "gpu-check.tar.gz")


def test_shards_run_each_test_once_and_split_neighbours() -> None:
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    shards = [list(range(29)) for _ in range(8)]
    for number, shard in enumerate(shards, 1):
        config = SimpleNamespace(getoption=lambda name, given=f"{number}/8": given, hook=hook)
        conftest.pytest_collection_modifyitems(config, shard)  # type: ignore[arg-type]
    assert shards == [[*range(29)][first::8] for first in range(8)]


@pytest.mark.slow
def test_script_runs_without_make_and_reports_missing_parts(tmp_path: Path) -> None:
    """The script is called as on a bare machine, here with torch but without a GPU."""
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / ".ci" / "gpu-check")]
    arguments = ["--results", str(tmp_path / "results")]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "all of first: torch sees no CUDA device" in done.stdout
    done = subprocess.run([*command, "some"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "PART must be one of first, kernels" in done.stderr


def test_carried_core_is_installed_for_quire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens only if no core is installed, and only with the core of this Python version."""
    package, core = tmp_path / "quire", tmp_path / "core"
    package.mkdir()
    core.mkdir()
    (core / "_core.312.so").write_text("the core")
    monkeypatch.setattr(check, "PACKAGE", package)
    monkeypatch.setattr(check, "CORE", core)
    for file, has_core, expected in (
        ("_core.312.so", "installed", "installed"),
        ("_core.311.so", "none", "none"),
        ("_core.312.so", "none", "build/gpu-site"),
    ):
        assert not list(package.iterdir())
        facts = {"core_file": file, "core": has_core, "torch": "2.11"}
        monkeypatch.setattr(Check, "_facts_of", lambda *_, facts=facts: dict(facts))
        found = Check("kernels", parser().parse_args([]), tmp_path, tmp_path)._query_facts()
        assert found["core"] == expected
    assert (package / "_core.312.so").read_text() == "the core"
    assert "_core.312.so in build/gpu-site/core" in check.carried_core()
    (core / "_core.312.so").unlink()
    assert "make gpu-site" in check.carried_core()
