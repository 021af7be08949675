"""Compare quire with other engines on this CPU, with the machine's ceilings measured in the same
run.

    python -m benchmarks.cpu [--engines quire llama.cpp] [--workloads batch] [--scratch DIR]

The model has Qwen3-0.6B's shape and random weights. Prompts are random; decoding is greedy, without
an end of sequence. Every engine has an environment of its own, made on demand in the scratch
directory (compiling llama.cpp takes minutes). Each round runs each workload by each engine in turn,
one process each.

Each run is reported with the load of other processes, the CPU steal of the host, and the memory
rate measured just before it. Runs with more than 0.15 cores of other load do not count; their
process is run again, at most twice. An engine that cannot be installed, fails or takes longer than
--timeout-s is listed with the reason and skipped from then on.
"""

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
from benchmarks.cpu.session import Comparison, arguments, scratch_of
from benchmarks.cpu.workloads import WORKLOADS, Workload, chosen_workload
from benchmarks.result_files import Row, write
from quire.tools.report import plain_facts

MAX_RUNS = 3  # of a process whose runs others disturb


@dataclass
class Session(Comparison[Workload]):
    """A comparison by all workloads of text."""

    torch_s: dict[str, float] = field(default_factory=dict)

    def prepare(self, engine: Engine, workloads: list[Workload]) -> None:
        """See Comparison."""
        prepare(self.scratch, engine, {workload.shape for workload in workloads})

    def job(self, engine: Engine, workload: Workload, round_: int) -> dict[str, Any]:
        """Return the work of one process."""
        return {
            "model": str(self.scratch.model(engine.source, workload.shape)),
            "workload": workload.name,
            "is_small": self.options.small,
            "threads": self.options.threads,
            "seed": round_ + 1,
            "options": engine.options | (self.settings if engine.is_ours else {}),
        }

    def run(self, engine: Engine, workload: Workload, round_: int) -> list[Run]:
        """Run one process. Raises Unavailable."""
        job = self.job(engine, workload, round_)
        name = f"run-{engine.name}-{workload.name}".replace(" ", "-")
        log = self.scratch.directory / "logs" / f"{name}.log"
        python = self.scratch.python(engine.environment)
        output = run_driver(python, engine.driver, job, log, self.options.timeout_s)
        return runs_of(output, engine, workload, round_)

    def measure(self, engine: Engine, workload: Workload, round_: int) -> None:
        """See Comparison. The first of all starts does not count."""
        name = f"{engine.name}: {workload.name}"
        if name in self.failures:
            return
        try:
            if workload.name == "start" and round_ == 0:
                self.run(engine, workload, round_)
            for _ in range(MAX_RUNS):
                runs = self.observed(engine, workload, round_)
                self.runs += runs
                print(*runs, sep="\n", flush=True)
                if all(run.is_quiet for run in runs):
                    break
        except Unavailable as error:
            self.fail(name, error)

    def observed(self, engine: Engine, workload: Workload, round_: int) -> list[Run]:
        """Run one process and measure the contention meanwhile. Raises Unavailable."""
        read_bytes_per_s = quick_read_bytes_per_s(self.options.threads)
        noise = Noise()
        runs = self.run(engine, workload, round_)
        stolen = noise.stolen()
        return [replace(run, stolen=stolen, read_bytes_per_s=read_bytes_per_s) for run in runs]

    def measure_torch(self, engines: list[Engine]) -> None:
        """Measure the import of torch by the engines that use it."""
        with_torch = {run.engine for run in self.runs if run.metrics.get("uses_torch")}
        for engine in engines:
            if engine.name in with_torch:
                python = self.scratch.python(engine.environment)
                self.torch_s[engine.name] = import_torch_s(python)

    def finish(self, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
        """See Comparison."""
        self.measure_torch(engines)
        ceilings = Ceilings.of(self.ceilings[str(self.options.threads)])
        summaries = summary(self.runs, engines, ceilings, self.options.small)
        print()
        lines = ceiling_lines(self.ceilings) + [""]
        for key in ("best", "median"):
            lines += table(summaries, engines, key)
        lines += [*legend(), "", *start_lines(self.runs, engines, self.torch_s), ""]
        lines += [f"failed: {name}: {reason}" for name, reason in self.failures.items()]
        print("\n".join(lines), flush=True)
        settings = self.written_settings(engines) | {"import_torch_s": self.torch_s}
        runs = [asdict(run) for run in self.runs]
        return rows_of(summaries, ratios(summaries, engines), runs), settings


def main() -> None:
    names = [workload.name for workload in WORKLOADS]
    options = arguments(__doc__, names, 300.0, "the small model in all workloads")
    workloads = [chosen_workload(name, options.small) for name in options.workloads]
    results = Session(options, scratch_of(options)).compare(ENGINES, workloads)
    write(options.output_json, "cpu", *results, plain_facts)


if __name__ == "__main__":
    main()
