"""Make the papers' figures: docs/results/evaluation*.md, their plots, and their numbers,
benchmarks/results/virtual-time/paper.json.

    python -m benchmarks.paper [--only fig_12 ...] [--jobs 2] [--seconds 60]
        [--reduced --output DIR]

With --only the other figures stay as they are.
"""

import argparse
import importlib
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.paper.catalogue import MODULES
from benchmarks.paper.document import write_document
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
    parser.add_argument("--reduced", action="store_true", help="short traces, as the tests have")
    parser.add_argument("--output", type=Path, default=ROOT, metavar="DIR",
                        help="where to write (default: this repository)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=FULL.seconds, metavar="S",
                        help="of arrivals in a trace (default: %(default)s)")  # fmt: skip
    options = parser.parse_args()
    if not 10 <= options.seconds <= 3600:
        parser.error(f"--seconds must be between 10 and 3600, not {options.seconds:g}")
    effort = REDUCED if options.reduced else replace(FULL, seconds=options.seconds)
    results = options.output / "benchmarks" / "results" / "virtual-time" / "paper.json"
    made = figures_of(read(results).rows) if results.exists() else {}
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = CountedRuns(pool)
        for name in options.only:
            made[name] = make(name, effort, runs)
            _save(made, results, options)
            took = time.monotonic() - began
            print(f"{name}: {runs.num_done} simulations so far, {took:.0f} s", flush=True)
    made = {name: made[name] for name in MODULES if name in made}
    figures = [figure for several in made.values() for figure in several]
    write_document(made, options.output / "docs" / "results")
    outside = [f for each in figures for f in each.findings if not f.holds]
    for finding in outside:
        print(f"outside its band: {finding.what}: {finding.ours:.3g}")
    return 1 if outside else 0


def _save(made: dict[str, list[Figure]], path: Path, options: argparse.Namespace) -> None:
    """Write the numbers of the figures that are made, in the order of the document."""
    ordered = {name: made[name] for name in MODULES if name in made}
    settings = {"effort": "reduced" if options.reduced else "full", "seconds": options.seconds}
    write(path, "paper", rows_of(ordered), settings, lambda: plain_facts() | VIRTUAL)


if __name__ == "__main__":
    raise SystemExit(main())
