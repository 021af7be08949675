"""Parts of the pages that no other test renders."""

import math
from pathlib import Path

import pytest

from benchmarks.paper import measured
from benchmarks.paper.bands import ANY, order
from benchmarks.paper.figure import Figure
from benchmarks.paper.measured import Case, Found
from benchmarks.paper.pages import MEASURED, measured_lines, pages_of
from benchmarks.paper.section import section
from benchmarks.result_files import write


def test_measured_results_are_shown_if_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_lines(tmp_path) == []
    monkeypatch.setattr(measured, "measure", lambda case, model: Found(24.5, 3.5, 0.125, 0.5, 7))
    rows = list(measured.rows_of([Case("preemption", "swap")], 2, "demo"))
    write(tmp_path / "here" / f"{MEASURED}.json", "paper.measured", rows, {})
    assert "| preemption | swap | 24.5 | 3.5 | 12.5% | 50.0% | 7 |" in measured_lines(tmp_path)


def test_one_sided_bands_are_described() -> None:
    for low, high, expected in (
        (1.5, ANY, "at least 1.5"),
        (0.0, 0.3, "at most 0.3"),
        (0.8, 1.25, "0.8 to 1.25"),
    ):
        figure = Figure("", "", "", findings=[order("a ratio", 1.0, low, high, "more", "why")])
        assert f"| more | {expected} | ordering | why |" in section(figure)
    assert math.isinf(ANY)


def test_claims_count_only_published_sentences() -> None:
    findings = [
        order("first", 1.0, 0.5, 2.0, "as good", "why"),
        order("second", 1.0, 0.5, 2.0, "", "why"),
    ]
    text = pages_of({"fig_1": [Figure("fig_1", "One", "P fig. 1", findings=findings)]})["papers.md"]
    assert "| ordering | 1 |" in text and "| first |" in text and "| second |" not in text
    assert "Bands without a published sentence: 1." in text
