"""Make the papers' figures: docs/results/evaluation*.md, their plots, and their numbers,
benchmarks/results/virtual-time/paper.json.

    python -m benchmarks.paper [--only fig_12 ...] [--jobs 2] [--seconds 240]
        [--reduced --output DIR]

--reduced skips panels that repeat others. With --only the other figures stay as they are. Each
figure's row in the result file has the length of its own traces. The processes of a figure's
simulations report their CPU time at its end.
"""

import argparse
import importlib
import resource
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper.catalogue import MODULES
from benchmarks.paper.figure import FULL, REDUCED, Effort, Figure
from benchmarks.paper.section import figures_of, rows_of
from benchmarks.result_files import VIRTUAL, read, write
from quire.tools.report import plain_facts

ROOT = Path(__file__).parents[2]


class CountedRuns:
    """Runs in processes, with counts of ended and running ones."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self.num_submitted = self.num_done = 0

    def submit(self, function: Any, *arguments: Any) -> "Future[Any]":
        self.num_submitted += 1
        future = self._pool.submit(function, *arguments)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: "Future[Any]") -> None:
        self.num_done += 1


def make(name: str, effort: Effort, runs: Any) -> list[Figure]:
    """Make the figures of one module."""
    module = importlib.import_module(f"benchmarks.paper.figures.{name}")
    found: list[Figure] = module.figures(effort, runs)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, metavar="FIGURE",
                        help=f"of {', '.join(MODULES)}")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--reduced", action="store_true", help="fewer panels, as the tests have")
    parser.add_argument("--output", type=Path, default=ROOT, metavar="DIR",
                        help="where to write (default: this repository)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=FULL.seconds, metavar="S",
                        help="of arrivals in a trace (default: %(default)s)")  # fmt: skip
    options = parser.parse_args()
    if not 10 <= options.seconds <= 3600:
        parser.error(f"--seconds must be between 10 and 3600, not {options.seconds:g}")
    if options.reduced and options.output.resolve() == ROOT.resolve():
        parser.error("--reduced needs --output: this repository's results are of all panels")
    effort = replace(REDUCED if options.reduced else FULL, seconds=options.seconds)
    results = options.output / "benchmarks" / "results" / "virtual-time" / "paper.json"
    made = figures_of(read(results).rows) if results.exists() else {}
    for name in options.only:
        began_s, cpu_s = time.monotonic(), _cpu_s()
        with ProcessPoolExecutor(options.jobs) as pool:
            runs = CountedRuns(pool)
            made[name] = make(name, effort, runs)
        _save(made, results, options)
        took_s, cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_s
        print(
            f"{name}: {runs.num_done} simulations, {cpu_s:.0f} s of CPU time in {took_s:.0f} s",
            flush=True,
        )
    from benchmarks.paper.document import write_document  # needs matplotlib, which tests lack

    made = {name: made[name] for name in MODULES if name in made}
    figures = [figure for several in made.values() for figure in several]
    write_document(made, options.output / "docs" / "results")
    outside = [f for each in figures for f in each.findings if not f.holds]
    for finding in outside:
        print(f"outside its band: {finding.what}: {finding.ours:.3g}")
    return 1 if outside else 0


def _cpu_s() -> float:
    """Return the CPU time of this process and of its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _save(made: dict[str, list[Figure]], path: Path, options: argparse.Namespace) -> None:
    """Write the numbers of the figures that are made, in the order of the document."""
    ordered = {name: made[name] for name in MODULES if name in made}
    settings = {"effort": "reduced" if options.reduced else "full"}
    write(path, "paper", rows_of(ordered), settings, lambda: plain_facts() | VIRTUAL)


if __name__ == "__main__":
    raise SystemExit(main())
