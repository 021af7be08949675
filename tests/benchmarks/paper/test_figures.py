"""The papers' figures on short traces: every number lies in its band."""

import importlib
import itertools
import math
from pathlib import Path

import pytest

from benchmarks.paper.catalogue import MODULES
from benchmarks.paper.figure import REDUCED, Curve, Effort, Figure, Finding, HereRuns
from benchmarks.paper.section import figures_of, rows_of, section
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.sweep import sweep
from benchmarks.paper.systems import ORCA_MAX, QUIRE
from benchmarks.result_files import newest
from quire.tools.workloads import SHAREGPT

QUICK = (
    "table_1",
    "fig_2_13",
    "fig_19",
    "table_4_1",
    "host_time",
    "speculation",
    "chunks",
    "real",
    "fidelity",
)


def made(name: str) -> list[Figure]:
    module = importlib.import_module(f"benchmarks.paper.figures.{name}")
    found: list[Figure] = module.figures(REDUCED, HereRuns())
    return found


def check(name: str) -> None:
    for figure in made(name):
        assert figure.title and figure.source
        for curve in figure.curves:
            assert len(curve.x) == len(curve.y) > 0
            assert all(map(math.isfinite, curve.y))
        for finding in figure.findings:
            assert finding.holds, finding


@pytest.mark.parametrize("name", QUICK)
def test_numbers_are_in_their_bands(name: str) -> None:
    check(name)


def test_the_page_has_the_numbers_of_the_last_run() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "evaluation.md").read_text(encoding="utf-8")
    figures = figures_of(newest("paper").rows)
    for figure in itertools.chain(*figures.values()):
        assert section(figure).strip() in page, figure.name


def test_rows_of_figures_are_figures_again() -> None:
    findings = [Finding("most", 1.5, -math.inf, math.inf, "2", " %"), Finding("least", 1, 0, 2)]
    curves = [Curve("ours", [1.0, 2.0], [3.0, 4.0]), Curve("theirs", [1.0], [2.0], True)]
    made = {"fig_1": [Figure("fig_1a", "One", "P", "x", "y", curves, findings, "text")]}
    assert figures_of(rows_of(made)) == made


def test_a_rate_is_sustained_up_to_a_limit() -> None:
    effort = Effort(10.0, 1, False)
    load = Load(SHAREGPT, 2.0, 0.0)
    ours, theirs = (sweep(name, OPT_13B, load, effort) for name in (QUIRE, ORCA_MAX))
    for each in (ours, theirs):
        rates = each.curve.x
        assert rates == sorted(rates) and len(set(rates)) == len(rates)
        low, middle, high = (each.sustained(limit) for limit in (0.25, 0.5, 1.0))
        assert low <= middle <= high <= rates[-1]
        assert each.at(middle).latency_s < 2.0
    assert ours.sustained() > 1.5 * theirs.sustained()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if name not in QUICK])
def test_numbers_of_longer_runs_are_in_their_bands(name: str) -> None:
    check(name)
