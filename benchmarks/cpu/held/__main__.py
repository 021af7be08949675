"""Compare engines that are held to AVX2, in short alternating rounds.

    python -m venv V && V/bin/pip install -C cmake.define.QUIRE_VARIANTS=avx2 .
    V/bin/python -m benchmarks.cpu.held --scratch DIR [--minutes 40]

The workloads are the ones of `benchmarks.cpu` with fewer tokens. Each process is appended to a
journal (by default DIR/held.jsonl). The command may be stopped at any time; the same command
resumes. After --minutes of measuring it stops by itself and prints a table of all results so far.

Round 1 measures all engines. Later rounds skip peers that were clearly slower than the best peer
(CONTENDS) in all figures of a workload. Each process reports how many of its threads used AVX-512
registers, as Linux notes it.
"""

import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.__main__ import Session
from benchmarks.cpu.engines import ENGINES, Engine
from benchmarks.cpu.held.instructions import VARIABLES, held
from benchmarks.cpu.held.journal import Journal
from benchmarks.cpu.held.report import FIGURES, cells_of, lines_of, values_of, wide_lines
from benchmarks.cpu.limits import Ceilings
from benchmarks.cpu.preparation import Unavailable
from benchmarks.cpu.processes import Run
from benchmarks.cpu.report import ceiling_lines
from benchmarks.cpu.session import options_parser, scratch_of
from benchmarks.cpu.workloads import SHORT, Workload, chosen_workload
from benchmarks.result_files import Row, write
from quire.tools.report import cpu_name, plain_facts

DEFAULT_ENGINES = (
    "quire bf16", "llama.cpp bf16", "llama.cpp f16", "openvino fp16",
    "quire int8", "llama.cpp q8_0", "openvino int8", "ctranslate2 int8",
    "quire int4", "llama.cpp q4_0", "openvino int4",
)  # fmt: skip
CONTENDS = 0.75  # of the best peer


class OutOfTime(KeyboardInterrupt):
    """The time for this command is over."""


@dataclass
class HeldSession(Session):
    """A comparison whose runs are in a journal.

    until_s: time of `time.monotonic` that ends it. It is set when all engines are prepared.
    num_measured: number of processes before the last measurement of the ceilings."""

    journal: Journal = field(kw_only=True)
    until_s: float = math.inf
    num_measured: int = -1

    def job(self, engine: Engine, workload: Workload, round_: int) -> dict[str, Any]:
        """See Session."""
        return super().job(engine, workload, round_) | {"is_short": True}

    def measure(self, engine: Engine, workload: Workload, round_: int) -> None:
        """See Comparison. A process that others disturbed runs again, at most --tries times."""
        key, name = (engine.name, workload.name, round_), f"{engine.name}: {workload.name}"
        if key in self.journal.done or name in self.journal.failures:
            return
        if not self.contends(engine, workload):
            return
        runs: list[Run] = []
        try:
            for _ in range(self.options.tries):
                if time.monotonic() > self.until_s:
                    raise OutOfTime
                found = self.observed(engine, workload, round_)
                print(*found, sep="\n", flush=True)
                runs += found
                if all(run.is_quiet for run in found):
                    break
        except Unavailable as error:
            self.fail(name, error)
            self.journal.add_failure(name, self.failures[name])
            return
        self.journal.add_runs(key, runs)

    def contends(self, engine: Engine, workload: Workload) -> bool:
        """Return whether an engine may be the best peer in one of a workload's figures."""
        values = values_of(self.journal.runs())
        peers = [e.name for e in ENGINES if e.category == engine.category and not e.is_ours]
        if engine.is_ours:
            return True
        gains = []
        for metric in [metric for metric in FIGURES if metric.workload == workload.name]:
            best = {
                peer: metric.best([value for value, _ in values[peer, metric.name]])
                for peer in peers
                if values[peer, metric.name]
            }
            if engine.name in best:
                gains.append(metric.gain(best[engine.name], metric.best(list(best.values()))))
        return not gains or max(gains) >= CONTENDS

    def measure_ceilings(self) -> None:
        """See Comparison. Nothing is measured where no process has run since."""
        self.until_s = min(self.until_s, time.monotonic() + 60 * self.options.minutes)
        self.ceilings = self.ceilings or self.journal.ceilings
        if self.ceilings and len(self.journal.done) == self.num_measured:
            return
        super().measure_ceilings()
        self.journal.add_ceilings(self.ceilings)
        self.num_measured = len(self.journal.done)

    def finish(self, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
        """See Comparison."""
        runs = self.journal.runs()
        ceilings = Ceilings.of(self.ceilings[str(self.options.threads)])
        cells = cells_of(runs, engines, ceilings, self.options.small)
        lines = ["", *ceiling_lines(self.ceilings), "", *lines_of(cells), "", *wide_lines(runs)]
        lines += [f"failed: {name}: {why}" for name, why in self.journal.failures.items()]
        print("\n".join(lines), flush=True)
        return [cell.row() for cell in cells], self.written_settings(engines) | dict(VARIABLES)


def main() -> None:
    names = [workload.name for workload in SHORT]
    parser = options_parser(__doc__, names, 300.0, "the small model in all workloads")
    parser.set_defaults(rounds=5)
    parser.add_argument("--journal", type=Path, help="what was measured so far")
    parser.add_argument("--minutes", type=float, default=40.0, help="of this command, at most")
    parser.add_argument("--tries", type=int, default=2, help="of a process that others disturb")
    options = parser.parse_args()
    os.environ.update(VARIABLES)
    scratch = scratch_of(options)
    head = {"cpu": cpu_name(), "threads": options.threads, "small": options.small}
    journal = Journal(options.journal or scratch.directory / "held.jsonl", head)
    journal.open()
    session = HeldSession(options, scratch, journal=journal)
    workloads = [chosen_workload(name, options.small, is_short=True) for name in options.workloads]
    engines = held([engine for engine in ENGINES if engine.name in DEFAULT_ENGINES])
    write(options.output_json, "cpu.held", *session.compare(engines, workloads), plain_facts)


if __name__ == "__main__":
    main()
