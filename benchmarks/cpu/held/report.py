"""The table of a comparison in rounds: medians, spread, share of the limit, quire / best peer."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.limits import Ceilings, min_times
from benchmarks.cpu.noise import AVX512_THREADS
from benchmarks.cpu.processes import Run
from benchmarks.cpu.workloads import METRICS, Metric, chosen_workload
from benchmarks.result_files import Row

FIGURES = [metric for metric in METRICS if metric.name not in ("start_s", "above_mib")]
HEAD = f"{'cell':<12} {'engine':<18} {'median':>9} {'lowest':>9} {'highest':>9} {'runs':>6}"
HEAD += f" {'of limit':>9} {'quire / best':>13}"


@dataclass(frozen=True)
class Cell:
    """One metric of one engine. values: of the quiet runs, or of all if none was quiet. gain: of an
    engine of ours over the best peer's median; None for peers."""

    engine: str
    metric: Metric
    values: Sequence[float]
    num_runs: int
    is_quiet: bool
    limit: float | None
    gain: float | None = None
    peer: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def share(self) -> float | None:
        return None if self.limit is None else self.metric.gain(self.median, self.limit)

    def line(self) -> str:
        """Return a line of the table; ~ if other processes disturbed all runs."""
        digits = self.metric.digits + 1
        numbers = (self.median, min(self.values), max(self.values))
        text = f"{self.metric.head:<12} {('' if self.is_quiet else '~') + self.engine:<18}"
        text += "".join(f" {number:9.{digits}f}" for number in numbers)
        text += f" {len(self.values):>2}/{self.num_runs:<3}"
        text += f" {'-' if self.share is None else f'{self.share:.0%}':>9}"
        return text + (f" {self.gain:8.2f} {self.peer}" if self.gain is not None else "")

    def row(self) -> Row:
        """Return a row of a result file."""
        return {
            "engine": self.engine, "figure": self.metric.name, "median": self.median,
            "lowest": min(self.values), "highest": max(self.values), "runs": list(self.values),
            "is_quiet": self.is_quiet, "limit": self.limit, "share": self.share,
            "ratio": self.gain, "peer": self.peer or None,
        }  # fmt: skip


def cells_of(
    runs: Iterable[Run], engines: Sequence[Engine], ceilings: Ceilings, is_small: bool = False
) -> list[Cell]:
    """Return the cells by category and metric."""
    values = values_of(runs)
    ours = {engine.name for engine in engines if engine.is_ours}
    found = []
    for category in dict.fromkeys(engine.category for engine in engines):
        for metric in FIGURES:
            workload = chosen_workload(metric.workload, is_small, is_short=True)
            group = []
            for engine in engines:
                own = values[engine.name, metric.name]
                if own and engine.category == category:
                    limit = min_times(workload, engine.format, ceilings).get(metric.name)
                    group.append(cell_of(engine, metric, own, limit))
            found += compared(group, ours)
    return found


def values_of(runs: Iterable[Run]) -> dict[tuple[str, str], list[tuple[float, bool]]]:
    """Return values and whether each was quiet, by engine and metric."""
    found = defaultdict(list)
    for run in runs:
        for name, value in run.metrics.items():
            found[run.engine, name].append((value, run.is_quiet))
    return found


def cell_of(
    engine: Engine, metric: Metric, values: Sequence[tuple[float, bool]], limit: float | None
) -> Cell:
    quiet = [value for value, is_quiet in values if is_quiet]
    used = quiet or [value for value, _ in values]
    return Cell(engine.name, metric, used, len(values), bool(quiet), limit)


def compared(group: Sequence[Cell], ours: set[str]) -> list[Cell]:
    """Return the cells of one metric; our engines' cells have their gain."""
    peers = [cell for cell in group if cell.engine not in ours]
    if not peers:
        return list(group)
    metric = peers[0].metric
    best = metric.best([cell.median for cell in peers])
    peer = next(cell.engine for cell in peers if cell.median == best)
    return [
        replace(cell, gain=metric.gain(cell.median, best), peer=peer)
        if cell.engine in ours
        else cell
        for cell in group
    ]


def lines_of(cells: Iterable[Cell]) -> list[str]:
    """Return the table, with a line between two metrics."""
    lines, last = [HEAD], ""
    for cell in cells:
        if last and cell.metric.name != last:
            lines.append("")
        lines.append(cell.line())
        last = cell.metric.name
    return lines


def wide_lines(runs: Iterable[Run]) -> list[str]:
    """Return a line for each engine whose threads used AVX-512 registers."""
    found: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        if run.metrics.get(AVX512_THREADS):
            found[run.engine].add(run.workload)
    if not found:
        return ["no thread of any engine used AVX-512 registers"]
    return [f"AVX-512 registers: {name}: {', '.join(sorted(in_))}" for name, in_ in found.items()]
