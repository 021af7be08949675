"""Options of the command."""

import sys
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper.figure import REDUCED, Effort, Figure
from benchmarks.paper.figures import table_4_1
from benchmarks.result_files import read

RESULTS = Path("benchmarks", "results", "virtual-time", "paper.json")


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paper", *options])
    return command.main()


@pytest.mark.parametrize("output", [".", "docs/..", str(command.ROOT)])
def test_reduced_results_need_another_output(
    output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(command.ROOT)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--reduced", "--output", output, "--only", "table_4_1")
    assert "--reduced needs --output" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["9", "3601", "nan"])
def test_trace_length_is_bounded(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--seconds", seconds)
    assert "--seconds must be between 10 and 3600" in capsys.readouterr().err


def test_reduced_runs_have_the_given_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    efforts: list[Effort] = []

    def figures(effort: Effort, runs: object) -> list[Figure]:
        efforts.append(effort)
        return [Figure("table_4_1", "Two counters", "T 4.4")]

    monkeypatch.setattr(table_4_1, "figures", figures)
    given = ("--reduced", "--seconds", "30", "--output", str(tmp_path), "--only", "table_4_1")
    assert run(monkeypatch, *given) == 0
    assert efforts == [Effort(30.0, REDUCED.halvings, False)]
    assert [row["figure"] for row in read(tmp_path / RESULTS).rows] == ["table_4_1"]
    assert "## Two counters" in (tmp_path / "docs/results/evaluation-scheduling.md").read_text()
