"""`.ci/gpu-check` without a GPU: what fails, hangs, crashes or prints without end costs one line,
and all that was printed is in the archive, also if the run is cut off."""

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import first, tasks
from benchmarks.gpu.check import Check, parser
from benchmarks.gpu.context import Bench
from benchmarks.gpu.first import Answer, answers, distance
from benchmarks.gpu.pieces import chosen
from benchmarks.gpu.report import Report
from benchmarks.gpu.results import (
    MOST_CHARS,
    MOST_LINES,
    Archive,
    by_importance,
    fitted,
    is_good,
    line_of,
)
from benchmarks.gpu.tasks import Outcome, Runner, Task
from quire.serve.llm import LLM
from tests import conftest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)


def shell(name: str, script: str, limit_s: float = 60.0) -> Task:
    return Task(name, f"whether {name} works", ("bash", "-c", script), limit_s)


def run_tasks(folder: Path, *given: Task, within_s: float = 60.0, jobs: int = 4) -> dict[str, str]:
    """Lines by the names of tasks."""
    found: list[Outcome] = []
    Runner(folder, time.monotonic() + within_s, ENVIRONMENT, found.append).run(given, jobs)
    return {each.task.name: line_of(each) for each in found}


def has_ended(pid: str) -> bool:
    """Soon: a process that was killed takes a moment to go."""
    state = Path(f"/proc/{pid.strip()}/stat")
    for _ in range(400):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.02)
    return False


def names_in(archive: Path) -> list[str]:
    with tarfile.open(archive) as opened:
        return opened.getnames()


def test_each_way_to_fail_is_one_line_with_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "END_S", 0.5)
    monkeypatch.setattr(tasks, "MOST_LOG_BYTES", 1 << 20)
    pytest_text = "E   AssertionError: not close!\\nE   more\\n2 failed, 3 passed in 4.20s"
    lines = run_tasks(
        tmp_path,
        shell("good", "echo fine"),
        shell("wrong", f"echo -e '{pytest_text}'; exit 1"),
        shell("raised", "echo 'Traceback'; echo 'torch.OutOfMemoryError: CUDA'; echo bye; exit 1"),
        shell("crashed", "echo before; kill -SEGV $$"),
        shell("silent", "exit 3"),
        shell("empty", "exit 5"),
        shell("hangs", "trap '' INT; echo 'E   first thing'; sleep 1000 & wait; wait", 1.0),
        shell("endless", "yes"),
        Task("absent", "a", ("/no/such/python",)),
    )
    assert lines["good"].startswith("right    good") and "whether good works" in lines["good"]
    assert lines["wrong"] == (
        "FAILED   wrong (2 failed, 3 passed in 4.20s): AssertionError: not close!"
    )
    assert lines["raised"].endswith("torch.OutOfMemoryError: CUDA")
    assert lines["crashed"].endswith(f"ended by signal {signal.SIGSEGV}; before")
    assert lines["silent"].startswith("FAILED") and lines["empty"].startswith("right")
    assert "stopped after" in lines["hangs"] and "before that first thing" in lines["hangs"]
    assert "printed over 1 MiB" in lines["endless"]
    assert "could not be started" in lines["absent"] and "/no/such/python" in lines["absent"]
    assert len(lines) == 9 and not any("\n" in line for line in lines.values())


def test_what_a_task_started_ends_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    run_tasks(tmp_path, shell("leaves", f"tail -f /dev/null & echo $! > {marker}; exit 1"))
    assert has_ended(marker.read_text())


def test_tasks_end_before_their_time_and_the_rest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time, margin is kept for those that run to end, and for what comes behind."""
    monkeypatch.setattr(tasks, "END_S", 1.0)
    given = [shell(f"task-{number}", "sleep 100") for number in range(3)]
    began = time.monotonic()
    lines = run_tasks(tmp_path, *given, within_s=2 * tasks.END_S + 1, jobs=1)
    assert time.monotonic() - began < 2 * tasks.END_S + 1
    assert "stopped after" in lines["task-0"] and "the time was used up" in lines["task-0"]
    assert lines["task-2"].endswith("not begun: the time was used up")


def test_a_hundred_failing_files_fit_a_screen() -> None:
    long = "x" * 5000
    body = [f"FAILED   file-{number}: Error: {long}\n{long}" for number in range(100)]
    lines = fitted([f"head {long}", "facts"], body, ["foot"])
    text = "\n".join(lines) + "\n"
    assert len(lines) <= MOST_LINES == 60 and len(text) <= MOST_CHARS == 10_000
    assert text.count("\n") == len(lines)
    assert lines[1] == "facts" and lines[-1] == "foot" and lines[2].startswith("FAILED   file-0")
    left_out = 100 - sum(line.startswith("FAILED") for line in lines)
    assert lines[-2] == f"... and {left_out} lines more, in the archive" and left_out < 60
    assert fitted(["a"], ["b"], ["c"]) == ["a", "b", "c"]


def test_failures_come_first() -> None:
    lines = ["right    a", "FAILED   b", "p  1 s", "MISSED   c", "FAILED   d"]
    assert by_importance(lines) == [
        "FAILED   b",
        "FAILED   d",
        "MISSED   c",
        "right    a",
        "p  1 s",
    ]


def test_an_archive_is_whole_at_all_times_and_small(tmp_path: Path) -> None:
    """It is replaced, never written in place; of a large file it keeps both ends."""
    folder, path = tmp_path / "results", tmp_path / "out" / "all.tar.gz"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "log.txt").write_text("one")
    archive = Archive(folder, path)
    archive.refresh()
    first = path.stat().st_ino
    with (folder / "large.txt").open("wb") as file:
        file.write(b"begin" + os.urandom(16 << 20) + b"end")
    archive.refresh()
    assert path.stat().st_ino == first, "it was written again at once"
    assert archive.write() == 2
    with tarfile.open(path) as opened:
        large = opened.extractfile("results/large.txt")
        assert large is not None
        data = large.read()
    assert data.startswith(b"begin") and data.endswith(b"end") and b"bytes left out" in data
    assert path.stat().st_size < 3 << 20
    assert names_in(path) == ["results/large.txt", "results/part/log.txt"]


FAKE = """#!/bin/bash
# Answers as Python would: facts of a machine, a collection, and tests that do what their names say.
case "$*" in
    *importlib.util*) echo '{facts}' ;;
    *--collect-only*) {collect} ;;
    *) {test} ;;
esac
"""
GPU = '{"torch": "2.11", "device": "H200, 139 GiB", "python": "3.12", "missing": []}'


def checked(tmp_path: Path, part: str, facts: str, collect: str, test: str, *more: str) -> Check:
    """A run of a part with a stand-in for Python."""
    fake = tmp_path / "python"
    text = FAKE.replace("{facts}", facts).replace("{collect}", collect).replace("{test}", test)
    fake.write_text(text)
    fake.chmod(0o755)
    arguments = [part, "--python", str(fake), "--budget-s", "60", "--jobs", "4", *more]
    check = Check(part, parser().parse_args(arguments), tmp_path / "results", tmp_path / "out")
    check.run()
    return check


def test_a_file_of_many_kernels_is_spread_over_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = "tests/kernels/test_attention.py"
    collect = f'for i in $(seq 50); do echo "{file}::test_it[$i]"; done'
    check = checked(tmp_path, "kernels", GPU, collect, 'echo "$@"', "--tests", file)
    commands = [" ".join(each.task.command) for each in check.outcomes]
    assert len(commands) == 3
    assert sorted(command.split("--shard=")[1] for command in commands) == ["1/3", "2/3", "3/3"]
    printed = capfd.readouterr().out
    assert "Paged attention in Triton against one softmax per row" in printed
    assert "H200" in printed


def test_the_share_of_memory_is_tested_with_nothing_beside_it(tmp_path: Path) -> None:
    """Each process writes when it began and ended; none is there while one is alone."""
    file = "tests/gpu/test_cuda.py"
    collect = f'for i in $(seq 70); do echo "{file}::test_it[$i]"; done'
    spans = tmp_path / "spans"
    test = f'a=$(date +%s%N); sleep 0.3; echo "$a $(date +%s%N) $*" >> {spans}'
    check = checked(tmp_path, "models", GPU, collect, test, "--tests", file)
    assert all(map(is_good, check.outcomes))
    found = [line.split(" ", 2) for line in spans.read_text().splitlines()]
    alone = [each for each in found if "gpu and alone" in each[2]]
    assert len(alone) == 1 and len(found) == 5
    assert all("gpu and not alone" in each[2] for each in found if each not in alone)
    for begin, end, _ in found:
        assert (begin, end) == tuple(alone[0][:2]) or begin > alone[0][1] or end < alone[0][0]


def test_a_hundred_failing_files_are_in_the_archive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = []
    for number in range(100):
        file = tmp_path / f"test_file{number}.py"
        file.write_text('"""What it checks.\n"""')
        files.append(str(file))
    error = 'echo "E   Error: $(printf "%0400d" 7)"; exit 1'
    check = checked(tmp_path, "kernels", GPU, "true", error, "--jobs", "12", "--tests", *files)
    printed = capfd.readouterr().out
    assert len(check.outcomes) == 100 and not any(map(is_good, check.outcomes))
    summary = (tmp_path / "out" / "gpu-check.txt").read_text()
    assert printed.endswith(summary)
    assert len(summary) <= 10_000 and summary.count("\n") <= 60
    assert "0 right, 100 failed" in summary
    names = names_in(tmp_path / "out" / "gpu-check.tar.gz")
    logs = [name for name in names if name.startswith("results/kernels/")]
    assert len(logs) == 102 and "results/summary-kernels.txt" in names


@pytest.mark.parametrize(
    ("part", "facts", "words"),
    [
        ("first", '{"python": "3.12", "missing": []}', "there is no torch (not installed)"),
        ("first", '{"torch": "2.11", "missing": []}', "torch sees no CUDA device"),
        ("kernels", GPU.replace("[]", '["pytest"]'), "there is no pytest"),
        ("bench", GPU.replace("[]", '["msgspec"]'), "there is no msgspec"),
        ("first", "no json", "no json"),
        ("ranks", GPU.replace("}", ', "gpus": 1}'), "it needs 2 GPUs, and torch sees 1"),
    ],
)
def test_what_cannot_run_is_named(tmp_path: Path, part: str, facts: str, words: str) -> None:
    check = checked(tmp_path, part, facts, "true", "echo never; exit 1")
    assert not check.outcomes and f"skipped  all of {part}: " in "\n".join(check._summary())
    assert words in "\n".join(check._summary())


def test_packages_carried_along_are_used_only_where_some_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "msgspec").mkdir(parents=True)
    monkeypatch.setattr(gpu_check, "SITE", site)
    facts = '$(case $PYTHONPATH in *site*) echo "[]" ;; *) echo "[\\"msgspec\\"]" ;; esac)'
    with_site = 'X\'; echo "{\\"torch\\": \\"2\\", \\"device\\": \\"d\\", \\"missing\\": ' + facts
    check = checked(tmp_path, "bench", with_site + "}\"; echo 'X", "true", "echo $PYTHONPATH")
    assert check.facts["site"] == "build/gpu-site" and check.facts["missing"] == []
    assert str(site) in check.outcomes[0].log.read_text()
    check = checked(tmp_path, "bench", GPU, "true", "echo $PYTHONPATH")
    assert "site" not in check.facts and str(site) not in check.outcomes[0].log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_cut_off_has_its_archive_and_its_summary(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The first file is done, the second hangs, then somebody stops the run."""
    files = []
    for name in ("done", "hangs"):
        files.append(str(tmp_path / f"test_{name}.py"))
        Path(files[-1]).write_text('"""What it checks."""')
    fake = tmp_path / "python"
    test = f'case "$*" in *test_hangs*) echo begun; echo $$ > {tmp_path}/pid; tail -f /dev/null ;; '
    test += "*) echo 'E   Error: that'; exit 1 ;; esac"
    text = FAKE.replace("{facts}", GPU).replace("{collect}", "true").replace("{test}", test)
    fake.write_text(text)
    fake.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.gpu.check", "kernels", "--python", str(fake)]
    command += ["--jobs", "1", "--results", str(tmp_path / "results"), "--out", str(tmp_path)]
    command += ["--tests", *files]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "FAILED   done" not in process.stdout.readline():
        assert process.poll() is None
    for _ in range(600):
        if (tmp_path / "pid").exists():
            break
        time.sleep(0.05)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"CUT OFF  this run was cut off: signal {number.name}" in rest
    assert "FAILED   done (0 s): Error: that" in rest
    assert "FAILED   hangs (" in rest and "cut off after" in rest
    names = names_in(tmp_path / "gpu-check.tar.gz")
    assert {"results/kernels/done.txt", "results/kernels/hangs.txt"} <= {*names}
    assert has_ended((tmp_path / "pid").read_text())


def test_it_works_without_make_and_says_what_it_lacks(tmp_path: Path) -> None:
    """As it is called on a bare machine: this one has torch, but no GPU."""
    environment = ENVIRONMENT | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / ".ci" / "gpu-check")]
    arguments = ["--results", str(tmp_path / "results")]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "all of first: torch sees no CUDA device" in done.stdout
    assert "results/summary-first.txt" in names_in(tmp_path / "gpu-check.tar.gz")
    done = subprocess.run([*command, "some"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "PART must be one of first, kernels" in done.stderr


def shard_of(given: str, items: list[str]) -> list[str]:
    """What --shard leaves of the tests."""
    left, away = list(items), list[str]()
    hook = SimpleNamespace(pytest_deselected=lambda items: away.extend(items))
    config = SimpleNamespace(getoption=lambda name: given, hook=hook)
    conftest.pytest_collection_modifyitems(config, left)  # type: ignore[arg-type]
    assert sorted(left + away) == sorted(items)
    return left


@pytest.mark.parametrize("count", [1, 3, 8])
def test_shards_run_each_test_once_and_separate_neighbours(count: int) -> None:
    items = [f"test-{number:02d}" for number in range(29)]
    found = [shard_of(f"{number}/{count}", items) for number in range(1, count + 1)]
    assert sorted(sum(found, [])) == items and shard_of("", items) == items
    assert max(map(len, found)) - min(map(len, found)) <= 1
    for given in ("0/3", "4/3", "3", "a/b", "-1/3"):
        with pytest.raises(pytest.UsageError, match="K from 1 to N"):
            shard_of(given, items)


class FakeReference:
    """Gives every token of a prompt a log-probability."""

    def __init__(self, positions: list[dict[int, float]]) -> None:
        self.positions = positions

    def generate(self, prompts: object, params: object, use_tqdm: bool) -> list[object]:
        named = [
            {token: argparse.Namespace(logprob=value) for token, value in each.items()}
            for each in self.positions
        ]
        return [argparse.Namespace(prompt_logprobs=[None, *named])]


def test_the_distance_of_an_answer() -> None:
    """Token 5 as likely as the reference has it, then 6, which is not its choice."""
    given = [Answer([9, 5, 6], [-0.5, -1.0])]
    found = distance(FakeReference([{5: -0.5}, {6: -1.25, 7: -1.0}]), given)  # type: ignore[arg-type]
    assert (found.apart, found.behind, found.num_same, found.num_tokens) == (0.25, 0.25, 1, 2)
    broken = [Answer([9, 5, 6], [float("nan"), -1.25])]
    found = distance(FakeReference([{5: -0.5}, {6: -1.25}]), broken)  # type: ignore[arg-type]
    assert found.apart == float("inf")


def demo_report(tmp_path: Path) -> Report:
    """What the piece of the demo model says on a CPU: as it is served beside the plainest code."""
    report = Report("demo-answers", tmp_path / "p.json")
    bench = Bench(torch.device("cpu"), report, time.monotonic() + 60, is_tiny=True)
    first.run_demo(bench)
    return report


def test_answers_are_right_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a hundredth off in one of many tokens is wrong: on a CPU rounding is no reason."""
    report = demo_report(tmp_path)
    assert not report.errors and len(report.rows) == 2
    assert all("18 of 18 tokens the same" in row.figure for row in report.rows)

    def slightly_wrong(llm: LLM, prompts: list[str], num: int) -> list[Answer]:
        found = answers(llm, prompts, num)
        found[1].logprobs[3] += 0.01
        return found

    monkeypatch.setattr(first, "answers", slightly_wrong)
    report = demo_report(tmp_path)
    assert not report.rows and len(report.errors) == 2
    assert "WRONG: 18 of 18 tokens the same, log p 0.01 apart" in report.errors[0]["traceback"]


def test_the_first_form_has_time_for_all_of_it() -> None:
    pieces = [*chosen("first"), *chosen("bench", "limits")]
    assert sum(piece.limit_s for piece in pieces) <= 480 - gpu_check.MARGIN_S


def test_a_log_that_is_gone_is_no_error(tmp_path: Path) -> None:
    outcome = Outcome(shell("x", "true"), None, 0.0, tmp_path / "none", "not begun: no time")
    assert line_of(outcome) == "FAILED   x (0 s): not begun: no time"
