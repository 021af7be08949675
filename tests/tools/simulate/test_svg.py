"""Charts are well-formed and place points correctly. Covers `tools/simulate/plot.py` as well."""

import xml.etree.ElementTree as ET

from benchmarks.virtual.dry_run import dry_run
from quire.base.settings.config import SchedulerConfig
from quire.tools.bench.shown_metrics import ShownMetrics
from quire.tools.simulate.arrivals import Arrival, simulated_request
from quire.tools.simulate.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    BarChart,
    Line,
    LineChart,
    charts_of,
    sheet,
)
from quire.tools.simulate.results import results_of
from quire.tools.simulate.run import simulate
from quire.tools.step_times import Roofline

SVG = "{http://www.w3.org/2000/svg}"


def test_points_and_ticks_are_placed() -> None:
    chart = LineChart("a < b", "s", [Line("one", [0, 5, 10], [0, 50, 100])])
    text = sheet("all & more", ["fact"], [chart, BarChart("bars", "ms", [("x", 3.0), ("y", 0.0)])])
    root = ET.fromstring(text)
    line = root.find(f".//{SVG}polyline")
    assert line is not None
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points[0] == (LEFT, HEIGHT - BOTTOM) and points[-1] == (WIDTH - RIGHT, TOP)
    labels = ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]
    assert {"a < b", "one", "20", "40", "3 ms", "0 ms", "fact", "all & more"} <= set(labels)


def test_empty_charts_are_well_formed() -> None:
    assert ET.fromstring(sheet("", [], [LineChart("", "", []), BarChart("", "")])) is not None


def test_charts_show_the_series_of_a_run() -> None:
    """Two requests share one row. The second waits two seconds; each second produces one token."""
    scheduler, _ = dry_run(100, 4, SchedulerConfig(1, 64), 128, enable_prefix_caching=False)
    arrivals = [Arrival(0.0, simulated_request(str(i), [3] * 8, 9), 2) for i in range(2)]
    run = simulate(scheduler, arrivals, Roofline(1.0, 0.0))
    results = results_of(run, ShownMetrics((), (99.0,), {}))
    first, gaps, rows, used, speed, num_open, spent = charts_of(run, results)
    assert isinstance(first, LineChart) and isinstance(gaps, LineChart)
    assert (first.lines[0].x[0], first.lines[0].x[-1]) == (1000.0, 3000.0)
    assert set(gaps.lines[0].x) == {1000.0}
    assert isinstance(rows, LineChart) and isinstance(used, LineChart)
    running, waiting = rows.lines
    assert round(sum(running.y) / len(running.y), 6) == 1.0
    assert round(sum(waiting.y) / len(waiting.y), 6) == 0.5
    assert max(used.lines[0].y) <= 0.03 + 1e-9
    assert isinstance(speed, LineChart) and sum(speed.lines[0].y) == 4
    assert isinstance(num_open, LineChart) and num_open.lines[0].y[0] == 2
    assert isinstance(spent, BarChart) and ("waiting: a row", 1000.0) in spent.bars
