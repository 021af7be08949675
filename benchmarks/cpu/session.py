"""What a comparison of engines on this CPU has measured so far."""

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.preparation import Scratch, Unavailable
from benchmarks.cpu.processes import ROOT, Run, measured_ceilings
from benchmarks.result_files import options_of


@dataclass
class Comparison:
    """Runs, and what failed. failures: by "engine" or "engine: workload"."""

    options: argparse.Namespace
    scratch: Scratch
    runs: list[Run] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)  # by number of threads

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of quire, in addition to those of each engine."""
        return dict(given.split("=", 1) for given in self.options.settings)

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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all comparisons have."""
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
