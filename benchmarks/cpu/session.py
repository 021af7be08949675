"""A comparison of engines on this CPU: its options, its rounds, and what it has measured so far."""

import argparse
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.preparation import Scratch, Unavailable
from benchmarks.cpu.processes import ROOT, Run, measured_ceilings
from benchmarks.result_files import Row, options_of
from quire.tools.report import benchmark_parser, plain_facts

Workload = TypeVar("Workload")


@dataclass
class Comparison(ABC, Generic[Workload]):
    """Runs of workloads, and what failed. failures: by "engine" or "engine: workload"."""

    options: argparse.Namespace
    scratch: Scratch
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)  # by number of threads

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of quire, in addition to the engine's own settings."""
        return dict(given.split("=", 1) for given in self.options.settings)

    @abstractmethod
    def prepare(self, engine: Engine, workloads: list[Workload]) -> None:
        """Make the environment and the models of an engine. Raises Unavailable."""

    @abstractmethod
    def measure(self, engine: Engine, workload: Workload, round_: int) -> None:
        """Run one process. A failure is noted, and not tried again."""

    @abstractmethod
    def finish(self, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
        """Print the tables. Return the rows and settings to write."""

    def compare(
        self, engines: list[Engine], workloads: list[Workload]
    ) -> tuple[list[Row], dict[str, Any]]:
        """Compare the chosen engines. Returns the rows and settings to write."""
        options, facts, began = self.options, plain_facts(), time.monotonic()
        about = f"{facts['date']}, commit {facts['commit']}"
        print(f"# {facts['cpu']}, {options.threads} threads; {about}")
        ready = self._prepared(chosen_engines(engines, options.engines), workloads)
        self._measure_rounds(ready, workloads)
        results = self.finish(ready)
        print(f"took {(time.monotonic() - began) / 60:.0f} minutes")
        return results

    def _prepared(self, engines: list[Engine], workloads: list[Workload]) -> list[Engine]:
        """Return the engines that can run."""
        ready = []
        for engine in engines:
            try:
                self.prepare(engine, workloads)
                ready.append(engine)
            except Unavailable as error:
                self.fail(engine.name, error)
        return ready

    def _measure_rounds(self, engines: list[Engine], workloads: list[Workload]) -> None:
        """Measure all. Ctrl-C ends it; what is there is still shown."""
        self.measure_ceilings()
        try:
            for round_ in range(self.options.rounds):
                for workload in workloads:
                    for engine in turns(engines, round_):
                        self.measure(engine, workload, round_)
                self.measure_ceilings()
                print(f"round {round_ + 1} of {self.options.rounds} is done", flush=True)
        except KeyboardInterrupt:
            self.failures["all"] = "interrupted"

    def fail(self, name: str, error: Unavailable) -> None:
        """Note and print a failure, without this machine's directories."""
        reason = str(error).replace(str(self.scratch.directory), "SCRATCH")
        self.failures[name] = reason.replace(str(ROOT), ".")
        print(f"{name}: {self.failures[name]}", flush=True)

    def measure_ceilings(self) -> None:
        """Measure what the machine can do. The best so far counts: neighbours only make it slower.

        Raises SystemExit if the first measurement fails, for example without the C++ core.
        """
        for threads in sorted({1, self.options.threads}):
            known = self.ceilings.get(str(threads), {})
            try:
                found = measured_ceilings(threads)
            except Unavailable as error:
                if not known:
                    raise SystemExit(f"ceilings: {error}") from error
                self.fail("ceilings", error)
                return
            best = {name: max(value, known.get(name, 0.0)) for name, value in found.items()}
            self.ceilings[str(threads)] = best

    def written_settings(self, engines: list[Engine]) -> dict[str, Any]:
        """Return the settings of a result file."""
        environments = {engine.environment for engine in engines if engine.environment}
        return options_of(self.options) | {
            "ceilings": self.ceilings,
            "failures": self.failures,
            "versions": {e.name: self.scratch.versions(e) for e in environments},
        }


def options_parser(
    doc: str | None, workloads: Sequence[str], timeout_s: float, small: str
) -> argparse.ArgumentParser:
    """Return a parser of a comparison's options. doc: its help; small: the help of --small."""
    parser = benchmark_parser(doc)
    parser.add_argument("--engines", nargs="+", default=[], metavar="NAME", help="how they begin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scratch", type=Path, help="environments and models, kept for next time")
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="NAME=FILE", help="environments made by hand"
    )
    parser.add_argument(
        "--settings", nargs="+", default=[], metavar="NAME=WORD", help="of quire, all its engines"
    )
    parser.add_argument("--workloads", nargs="+", choices=workloads, default=workloads)
    help_ = "of one process; slower ones are left out"
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help=help_)
    parser.add_argument("--small", action="store_true", help=small)
    return parser


def arguments(
    doc: str | None, workloads: Sequence[str], timeout_s: float, small: str
) -> argparse.Namespace:
    """Read the options of a comparison."""
    return options_parser(doc, workloads, timeout_s, small).parse_args()


def scratch_of(options: argparse.Namespace) -> Scratch:
    """Return the scratch directory that the options name."""
    default = Path(tempfile.gettempdir()) / "quire-bench-cpu"
    pythons = {name: Path(file) for name, _, file in (p.partition("=") for p in options.python)}
    return Scratch((options.scratch or default).resolve(), pythons)


def chosen_engines(engines: list[Engine], prefixes: list[str]) -> list[Engine]:
    """Return the engines whose names begin with one of these; all if there are none.

    Raises SystemExit if no name begins so.
    """
    found = [e for e in engines if not prefixes or any(e.name.startswith(p) for p in prefixes)]
    if not found:
        names = ", ".join(engine.name for engine in engines)
        raise SystemExit(f"no engine begins with {' or '.join(prefixes)}; there are: {names}")
    return found


def turns(engines: list[Engine], round_: int) -> list[Engine]:
    """Return the engines in the order of a round: every round begins with another one."""
    first = round_ * 5 % max(1, len(engines))
    return engines[first:] + engines[:first]
