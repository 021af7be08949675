"""quire beside other engines on this CPU, with the machine's ceilings measured in the same run.

    python -m benchmarks.cpu [--engines quire llama.cpp] [--workloads batch] [--scratch DIR]

Qwen3-0.6B's shape with random weights, random prompts, greedy, no end of sequence; every engine in
an environment of its own, which is made on demand in the scratch directory (compiling llama.cpp
takes minutes). Each round runs each workload by each engine in turn, one process each. Beside each
run stands what other processes took meanwhile, what the host took, and the rate at which memory was
read just before. Runs during which others took more than 0.15 cores do not count, and their process
is run again, twice at most. An engine that cannot be installed, fails or takes longer than
--timeout-s is listed with the reason, and not tried again.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.cpu.engines import ENGINES, Engine
from benchmarks.cpu.limits import Ceilings, quick_read_bytes_per_s
from benchmarks.cpu.noise import Noise
from benchmarks.cpu.preparation import Unavailable, prepare
from benchmarks.cpu.processes import Run, import_torch_s, run_driver, runs_of
from benchmarks.cpu.report import (
    ceiling_lines,
    legend,
    ratios,
    rows_of,
    start_lines,
    summary,
    table,
)
from benchmarks.cpu.session import Comparison, add_options, chosen_engines, scratch_of, turns
from benchmarks.cpu.workloads import WORKLOADS, Workload, chosen_workload
from benchmarks.result_files import Row, write
from quire.tools.report import benchmark_parser, plain_facts

TRIES = 3  # of a process whose runs others disturb


@dataclass
class Session(Comparison):
    """A comparison by all workloads of text."""

    torch_s: dict[str, float] = field(default_factory=dict)

    def run(self, engine: Engine, workload: Workload, round_: int) -> list[Run]:
        """One process. Raises Unavailable."""
        job = {
            "model": str(self.scratch.model(engine.source, workload.shape)),
            "workload": workload.name,
            "is_small": self.options.small,
            "threads": self.options.threads,
            "seed": round_ + 1,
            "options": engine.options | (self.settings if engine.is_ours else {}),
        }
        name = f"run-{engine.name}-{workload.name}".replace(" ", "-")
        log = self.scratch.directory / "logs" / f"{name}.log"
        python = self.scratch.python(engine.environment)
        output = run_driver(python, engine.driver, job, log, self.options.timeout_s)
        return runs_of(output, engine, workload, round_)

    def measure(self, engine: Engine, workload: Workload, round_: int) -> None:
        """A failure is noted, and not tried again. The first of all starts does not count."""
        name = f"{engine.name}: {workload.name}"
        if name in self.failures:
            return
        try:
            if workload.name == "start" and round_ == 0:
                self.run(engine, workload, round_)
            for _ in range(TRIES):
                runs = self.observed(engine, workload, round_)
                self.runs += runs
                print(*runs, sep="\n", flush=True)
                if all(run.is_quiet for run in runs):
                    break
        except Unavailable as error:
            self.fail(name, error)

    def observed(self, engine: Engine, workload: Workload, round_: int) -> list[Run]:
        """One process, and what the machine did meanwhile. Raises Unavailable."""
        read_bytes_per_s = quick_read_bytes_per_s(self.options.threads)
        noise = Noise()
        runs = self.run(engine, workload, round_)
        stolen = noise.stolen()
        return [replace(run, stolen=stolen, read_bytes_per_s=read_bytes_per_s) for run in runs]


def prepared(session: Session, engines: list[Engine], workloads: list[Workload]) -> list[Engine]:
    """Those that can run."""
    ready = []
    for engine in engines:
        try:
            prepare(session.scratch, engine, {workload.shape for workload in workloads})
            ready.append(engine)
        except Unavailable as error:
            session.fail(engine.name, error)
    return ready


def measure_rounds(session: Session, engines: list[Engine], workloads: list[Workload]) -> None:
    """Ctrl-C ends the measuring; what is there is still shown."""
    session.measure_ceilings()
    try:
        for round_ in range(session.options.rounds):
            for workload in workloads:
                for engine in turns(engines, round_):
                    session.measure(engine, workload, round_)
            session.measure_ceilings()
            print(f"round {round_ + 1} of {session.options.rounds} is done", flush=True)
    except KeyboardInterrupt:
        session.failures["all"] = "interrupted"


def measure_torch(session: Session, engines: list[Engine]) -> None:
    with_torch = {run.engine for run in session.runs if run.metrics.get("uses_torch")}
    for engine in engines:
        if engine.name in with_torch:
            session.torch_s[engine.name] = import_torch_s(
                session.scratch.python(engine.environment)
            )


def finish(session: Session, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
    """Print the tables. Returns the rows and settings that are written."""
    ceilings = Ceilings.of(session.ceilings[str(session.options.threads)])
    summaries = summary(session.runs, engines, ceilings, session.options.small)
    print()
    lines = ceiling_lines(session.ceilings) + [""]
    for key in ("best", "median"):
        lines += table(summaries, engines, key)
    lines += [*legend(), "", *start_lines(session.runs, engines, session.torch_s), ""]
    lines += [f"failed: {name}: {reason}" for name, reason in session.failures.items()]
    print("\n".join(lines), flush=True)
    settings = session.written_settings(engines) | {"import_torch_s": session.torch_s}
    runs = [asdict(run) for run in session.runs]
    return rows_of(summaries, ratios(summaries, engines), runs), settings


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [workload.name for workload in WORKLOADS]
    add_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="of one process; slower ones are left out"
    )
    parser.add_argument("--small", action="store_true", help="the small model in all workloads")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    session = Session(options, scratch_of(options))
    facts, began = plain_facts(), time.monotonic()
    print(f"# {facts['cpu']}, {options.threads} threads; {facts['date']}, commit {facts['commit']}")
    workloads = [chosen_workload(name, options.small) for name in options.workloads]
    engines = prepared(session, chosen_engines(ENGINES, options.engines), workloads)
    measure_rounds(session, engines, workloads)
    measure_torch(session, engines)
    results = finish(session, engines)
    print(f"took {(time.monotonic() - began) / 60:.0f} minutes")
    write(options.output_json, "cpu", *results, plain_facts)


if __name__ == "__main__":
    main()
