"""The papers' figures on short traces: each number lies in its band."""

import importlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from benchmarks.paper.capacity import Capacity, gain
from benchmarks.paper.catalogue import MODULES
from benchmarks.paper.figure import (
    BEYOND,
    FULL,
    REDUCED,
    VALUE,
    Curve,
    Figure,
    Finding,
    HereRuns,
    Rates,
)
from benchmarks.paper.figures import fig_2_13, table_4_1
from benchmarks.paper.pages import PAGES, STANDINGS, pages_of
from benchmarks.paper.section import figures_of, rows_of, section
from benchmarks.paper.settings import OPT_13B, OPT_66B, Load
from benchmarks.paper.sweep import Sweep
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE, SYSTEMS, Served, serve
from benchmarks.result_files import newest
from quire.tools.workloads import SHAREGPT

FOLDER = Path(__file__).parents[3] / "docs" / "results"
MAX_LINES = 250  # of a page
QUICK = (
    "table_1",
    "table_4_1",
    "assumptions",
    "block_tables",
    "execution_modes",
    "host_time",
    "speculation",
    "real",
    "fig_18a",
    "fidelity",
)
SIMULATED = {"fig_12a": OPT_13B, "fig_12b": OPT_66B}  # fig. 12 c has its own band


def check(name: str) -> None:
    module = importlib.import_module(f"benchmarks.paper.figures.{name}")
    found: list[Figure] = module.figures(REDUCED, HereRuns())
    for figure in found:
        assert figure.title and figure.source, name
        for curve in figure.curves:
            assert len(curve.x) == len(curve.y) > 0, (name, curve.label)
            assert all(map(math.isfinite, curve.y)), (name, curve.label)
        for finding in figure.findings:
            assert finding.holds, (name, finding)
            assert finding.why or finding.standing == BEYOND, (name, finding)
            assert bool(finding.published) == (finding.standing in STANDINGS), (name, finding)


def test_quick_figures_lie_in_their_bands() -> None:
    for name in QUICK:
        check(name)


def test_pages_show_the_newest_results() -> None:
    made = figures_of(newest("paper").rows)
    assert {name for page in PAGES for name in page.modules} == set(MODULES) == set(made)
    for name, text in pages_of(made).items():
        assert (FOLDER / name).read_text("utf-8") == text, f"{name}: run make paper"
        assert len(text.splitlines()) <= MAX_LINES, name
    titles = [figure.title for each in made.values() for figure in each]
    text = "".join(pages_of(made).values())
    assert all(f"## {title}\n" in text for title in titles)


def test_figures_survive_conversion_to_rows() -> None:
    findings = [Finding("most", 1.5, -math.inf, math.inf, "2", " %"), Finding("least", 1, 0, 2)]
    curves = [Curve("ours", [1.0, 2.0], [3.0, 4.0]), Curve("theirs", [1.0], [2.0], True)]
    rates = [Rates("ours", 1.5, 2.5), Rates("theirs", None, 0.5)]
    figure = Figure("fig_1a", "One", "P", "x", "y", curves, findings, "text", rates=rates)
    made = {"fig_1": [figure]}
    assert figures_of(rows_of(made)) == made
    assert "| ours | 1.5 | 2.5 | 1.5 |" in (text := section(figure))
    assert "| theirs | not reached | 0.5 | 0.5 |" in text


def test_ratios_follow_from_the_rates_in_the_file() -> None:
    num = 0
    for each in figures_of(newest("paper").rows).values():
        for figure in each:
            by_name = {each.system: each.sustained for each in figure.rates}
            for finding in figure.findings:
                other = finding.what.removeprefix("sustained rate, quire over ")
                if other in by_name:
                    assert finding.ours == pytest.approx(by_name[QUIRE] / by_name[other])
                    num += 1
    assert num == 11  # three panels of fig. 12 with two each, fig. 16 with two, fig. 17 with three


def test_each_published_number_is_counted_once() -> None:
    found = [
        (figure.source.split(",")[0], finding.what.removesuffix(", by formula"))
        for figures in figures_of(newest("paper").rows).values()
        for figure in figures
        for finding in figure.findings
        if finding.standing in STANDINGS
    ]
    assert len(found) == len(set(found))


class BlankRuns:
    """Runs that return blank results of the right type, since bands depend on the code alone."""

    def __init__(self) -> None:
        self.num_submitted = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        self.num_submitted += 1
        future: Future[Any] = Future()
        future.set_result(blank(get_type_hints(function)["return"], arguments[0]))
        return future


def blank(kind: Any, first: Any) -> Any:
    """Return a result of this type. first: the first argument of its case, such as the system."""
    if kind is Served:
        uses = dict.fromkeys(fig_2_13.KINDS, 0.25)
        given = {"saved": 0.5, "throughput": 1.0, "offered": 1.0, "num_computed": 1}
        return Served(first, 1.0, 1.0, 1.0, 1.0, uses, **given)
    if kind is Sweep:
        return Sweep(first, [blank(Served, first)])
    if get_origin(kind) is tuple:
        return tuple(blank(each, first) for each in get_args(kind))
    if get_origin(kind) is list:
        return [blank(*get_args(kind), first)]
    assert kind is float, kind
    return 1.0


def by_code(name: str) -> tuple[list[Figure], bool]:
    """Return the figures of a module at full effort without their results, and whether these come
    from simulations."""
    runs = BlankRuns()
    module = importlib.import_module(f"benchmarks.paper.figures.{name}")
    return module.figures(FULL, runs), runs.num_submitted > 0


def band(finding: Finding) -> dict[str, Any]:
    """Return all of a finding but the result."""
    given = {**asdict(finding)}
    del given["ours"]
    return given


@pytest.mark.parametrize("name", MODULES)
def test_results_lie_in_the_bands_of_the_code(name: str) -> None:
    """The result file has exactly the bands that the code sets. Results without simulations equal
    the code's as well."""
    written = figures_of(newest("paper").rows)[name]
    figures, is_simulated = by_code(name)
    assert [each.name for each in written] == [each.name for each in figures]
    for ours, code in zip(written, figures, strict=True):
        assert ours.seconds == code.seconds, f"{ours.name}: run make paper"
        assert ours.source == code.source
        for found, finding in zip(ours.findings, code.findings, strict=True):
            assert band(found) == pytest.approx(band(finding)), f"{ours.name}: run make paper"
            assert finding.low <= found.ours <= finding.high, (ours.name, found)
            if not is_simulated:
                assert found.ours == pytest.approx(finding.ours), (ours.name, found)


def test_bands_of_published_numbers_are_narrow() -> None:
    """A band around a published number excludes its double."""
    figures = [figure for name in MODULES for figure in by_code(name)[0]]
    found = [f for figure in figures for f in figure.findings if f.standing == VALUE]
    assert len(found) > 25
    for each in found:
        assert each.high <= 3.6 * each.low, each


def test_formula_agrees_with_the_simulations() -> None:
    """Compare the rates by `capacity.py` with those of whole traces with queues."""
    for figure, setting in SIMULATED.items():
        for other in (ORCA_ORACLE, ORCA_MAX):
            (row,) = newest("paper").where(
                figure=figure, what=f"sustained rate, quire over {other}"
            )
            formula = gain(Capacity(QUIRE, setting, SHAREGPT), other)
            assert row["ours"] == pytest.approx(formula, rel=0.25), (figure, other)


def test_rows_of_table_4_1_name_existing_tests() -> None:
    path = Path(__file__).parents[2] / "scheduler" / "test_table_4_1.py"
    text = path.read_text("utf-8")
    for _, _, tests in table_4_1.ROWS:
        assert all(f"def {test}(" in text for test in tests.split(", ")), tests


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if name not in QUICK])
def test_longer_figures_lie_in_their_bands(name: str) -> None:
    check(name)


def test_each_system_serves_a_short_trace() -> None:
    load = Load(SHAREGPT, 3.0, 10.0)
    found = {system: serve(system, OPT_13B, load) for system in SYSTEMS}
    for system, served in found.items():
        assert served.system == system and served.batched > 1.0, served
        assert 0.0 < served.latency_s < 2.0 and served.tokens_per_s > 0.0, served
    latencies = [found[system].latency_s for system in SYSTEMS]
    assert latencies == sorted(latencies), found  # quire first, FasterTransformer last
