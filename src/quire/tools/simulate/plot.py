"""A simulated run as a sheet of charts: what one looks at first."""

from pathlib import Path

import numpy as np

from quire.base.errors import ConfigError
from quire.tools.simulate.results import MS, Results, by_second, served_well
from quire.tools.simulate.run import Run
from quire.tools.simulate.served import Float64
from quire.tools.simulate.svg import BarChart, Line, LineChart, sheet

POINTS = 240  # of a curve


def write_plot(path: Path | None, title: str, facts: list[str], run: Run, results: Results) -> None:
    """Write the sheet, if a path was given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sheet(title, facts, charts_of(run, results)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error.strerror}.") from error


def charts_of(run: Run, results: Results) -> list[LineChart | BarChart]:
    """Make the charts: waits, gaps, rows, memory, speed, and where time went."""
    done = served_well(run)
    waits = np.array([each.wait_s for each in done]) * MS
    tokens, num_open = by_second(run)
    speed, open_ = _shorter(tokens), _shorter(num_open.astype(np.float64))
    spent = results.spent
    bars = [(f"waiting: {name}", value) for name, value in spent.waiting.items()]
    bars += [("prompt", spent.prefill), ("answer", spent.decode)]
    rows, waiting, used = (_over_time(run, name) for name in ("num_rows", "num_waiting", "used"))
    return [
        LineChart("Time to the first token", "ms, share of the requests", [_shares(waits)], 1.0),
        LineChart("Between two tokens", "ms, share of the gaps", [_shares(run.gaps_s * MS)], 1.0),
        LineChart(
            "Sequences, all replicas", "s", [Line("in a step", *rows), Line("waiting", *waiting)]
        ),
        LineChart("KV pool in use", "s, share of the fullest replica", [Line("", *used)], 1.0),
        LineChart("Output tokens per second", "s", [Line("", *speed)]),
        LineChart("Requests that are open", "s", [Line("", *open_)]),
        BarChart("Time of a request, on average", "ms", bars),
    ]


def _shares(values: Float64) -> Line:
    """Return how many are at most so large."""
    shares = np.linspace(0, 1, POINTS)
    if not len(values):
        return Line("", [], [])
    return Line("", np.quantile(values, shares).tolist(), shares.tolist())


def _shorter(values: Float64) -> tuple[list[float], list[float]]:
    """Return seconds and means of neighbours, so that no curve has more than POINTS."""
    size = max(1, -(-len(values) // POINTS))
    edges = np.arange(0, len(values), size)
    counts = np.diff([*edges, len(values)])
    return (edges + counts / 2).tolist(), (np.add.reduceat(values, edges) / counts).tolist()


def _over_time(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Return means over equal parts of the run: sums over the replicas, of `used` the greatest."""
    edges = np.linspace(0, max(run.duration_s, 1e-9), POINTS + 1)
    found = []
    for each in run.listeners:
        at_s, values = np.array(each.series.at_s), np.array(getattr(each.series, name), float)
        if not len(at_s):
            continue
        ends_s = np.append(at_s[1:], run.duration_s)
        area = np.concatenate([[0.0], np.cumsum(values * (ends_s - at_s))])
        whole = np.interp(edges, np.append(at_s, run.duration_s), area)
        found.append(np.diff(whole) / np.diff(edges))
    both = np.array(found) if found else np.zeros((1, POINTS))
    total = both.max(0) if name == "used" else both.sum(0)
    return ((edges[1:] + edges[:-1]) / 2).tolist(), total.tolist()
