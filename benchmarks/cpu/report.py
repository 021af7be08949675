"""The tables: each engine's best and median, its share of the limit, quire and the best peer."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.limits import Ceilings, min_times
from benchmarks.cpu.processes import Run
from benchmarks.cpu.workloads import METRICS, Metric, chosen_workload

CATEGORIES = ("16-bit", "8-bit", "4-bit")
NAME_WIDTH, CELL_WIDTH = 24, 13
GIGA = 1e9


def summary(
    runs: Iterable[Run],
    engines: list[Engine],
    ceilings: Ceilings,
    is_small: bool,
    measured: Sequence[Metric] = METRICS,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the results by engine and metric: best, median, limit, share, num_runs, num_quiet.

    Disturbed runs do not count, unless all are disturbed.
    """
    listed, found = list(runs), {}
    for engine in engines:
        metrics = {}
        for metric in measured:
            own = [
                run for run in listed if run.engine == engine.name and metric.name in run.metrics
            ]
            if own:
                workload = chosen_workload(metric.workload, is_small)
                limit = min_times(workload, engine.format, ceilings).get(metric.name)
                metrics[metric.name] = summarised(metric, own, limit)
        found[engine.name] = metrics
    return found


def summarised(metric: Metric, runs: list[Run], limit: float | None) -> dict[str, float]:
    quiet = [run for run in runs if run.is_quiet]
    values = [run.metrics[metric.name] for run in quiet or runs]
    found = {
        "best": metric.best(values),
        "median": statistics.median(values),
        "num_runs": len(runs),
        "num_quiet": len(quiet),
    }
    if limit is not None:
        found |= {"limit": limit, "share": metric.gain(found["best"], limit)}
    return found


def ratios(
    summaries: dict[str, dict[str, dict[str, float]]],
    engines: list[Engine],
    key: str = "best",
    metrics: Sequence[Metric] = METRICS,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, for each of our engines and each metric, its gain over the best peer of its category,
    and that peer."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for ours in [engine for engine in engines if engine.is_ours]:
        peers = [e.name for e in engines if e.category == ours.category and not e.is_ours]
        found[ours.name] = {}
        for metric in metrics:
            values = {
                name: summaries[name][metric.name][key]
                for name in peers
                if metric.name in summaries[name]
            }
            if values and metric.name in summaries[ours.name]:
                best = metric.best(list(values.values()))
                own = summaries[ours.name][metric.name][key]
                name = next(name for name, value in values.items() if value == best)
                found[ours.name][metric.name] = {"ratio": metric.gain(own, best), "peer": name}
    return found


def table(
    summaries: dict[str, dict[str, dict[str, float]]],
    engines: list[Engine],
    key: str,
    metrics: Sequence[Metric] = METRICS,
) -> list[str]:
    """Return lines, one block for each category. key: best or median."""
    compared, lines = ratios(summaries, engines, key, metrics), []
    for category in CATEGORIES:
        rows = [e for e in engines if e.category == category and summaries[e.name]]
        if not rows:
            continue
        lines.append(f"{category + ', ' + key:{NAME_WIDTH}s}" + _cells(m.head for m in metrics))
        for engine in rows:
            cells = (_shown(m, summaries[engine.name].get(m.name), key) for m in metrics)
            lines.append(f"{engine.name:{NAME_WIDTH}s}" + _cells(cells))
        for engine in rows:
            if engine.is_ours and compared[engine.name]:
                found = compared[engine.name]
                cells = (_ratio(found.get(metric.name)) for metric in metrics)
                name = f"  {engine.name.removeprefix('quire ')} / best peer"
                lines.append(f"{name:{NAME_WIDTH}s}" + _cells(cells))
        lines.append("")
    return lines


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>{CELL_WIDTH}s}" for text in texts).rstrip()


def _shown(metric: Metric, found: dict[str, float] | None, key: str) -> str:
    """Return the value and its share of the limit; ~ if other processes disturbed all runs."""
    if found is None:
        return "-"
    text = f"{found[key]:.{metric.digits}f}"
    if key == "best" and "share" in found:
        text += f" {found['share']:.0%}"
    return ("" if found["num_quiet"] else "~") + text


def _ratio(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['ratio']:.2f}x"


def ceiling_lines(measured: dict[str, dict[str, float]]) -> list[str]:
    """Return lines about the ceilings. measured: by number of threads."""
    lines = []
    for threads, found in measured.items():
        reading = (
            f"reading {found['read'] / GIGA:.1f} GB/s, huge pages {found['read_huge'] / GIGA:.1f}"
        )
        peaks = ", ".join(
            f"{name} {value / GIGA:,.0f}" for name, value in found.items() if "read" not in name
        )
        lines.append(f"{threads} threads: {reading}; 10^9 operations/s: {peaks}")
    return lines


def legend(metrics: Sequence[Metric] = METRICS) -> list[str]:
    lines = [f"{metric.head:10s}{metric.title}" for metric in metrics]
    lines.append(
        "%         share of the limit that arithmetic and memory set for the engine's format"
    )
    return [*lines, "~         in all runs other processes took more than 0.15 cores"]


def start_lines(runs: Iterable[Run], engines: list[Engine], torch_s: dict[str, float]) -> list[str]:
    """Return lines about the parts of each engine's fastest start."""
    listed, lines = list(runs), []
    for engine in engines:
        own = [run for run in listed if run.engine == engine.name and run.workload == "start"]
        if own:
            metrics = min((run.metrics for run in own), key=lambda metrics: metrics["start_s"])
            line = (
                f"{engine.name:{NAME_WIDTH}s}import {metrics['import_s']:.2f}, load"
                f" {metrics['load_s']:.2f}, first token {metrics['first_s']:.2f} s"
            )
            if metrics["uses_torch"] and engine.name in torch_s:
                line += f"; torch's import alone {torch_s[engine.name]:.2f} s"
            lines.append(line)
    return lines


def rows_of(
    summaries: dict[str, dict[str, Any]],
    ratios: dict[str, dict[str, Any]],
    runs: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return one row for each figure of each engine, with that of every run next to the summary."""
    rows = []
    for engine in dict.fromkeys([*summaries, *(run["engine"] for run in runs)]):
        own = [run for run in runs if run["engine"] == engine]
        found = summaries.get(engine, {})
        for figure in dict.fromkeys([*found, *(name for run in own for name in run["metrics"])]):
            having = [run for run in own if figure in run["metrics"]]
            rows.append(
                {"engine": engine, "figure": figure, **found.get(figure, {}),
                 **ratios.get(engine, {}).get(figure, {}),
                 "runs": [run["metrics"][figure] for run in having],
                 "others_cores": [run["others"] for run in having]}
            )  # fmt: skip
    return rows
