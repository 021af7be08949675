"""Compare quire with other engines by images on this CPU, with the limits that the run measures.

    python -m benchmarks.cpu.images [--engines quire openvino] [--workloads first] [--scratch DIR]

first: the time to the first token for a picture of 1,024 x 1,024 pixels and 64 text tokens. The
model has Qwen3-VL-2B's shape and random weights. stream: images per second of different pictures,
until each has its first token. Its model has the same vision tower and three small text layers.

Pictures are in memory. Times include preprocessing, but not the decoding of image files. Answers
are greedy.

Each engine has an environment of its own. Environments and models are made on demand in the scratch
directory. Each round runs each workload by each engine in turn, one process each. The first tokens
are compared with those of transformers. The best and the median come from the runs during which
other processes took at most 0.15 cores, or from all runs if there are no such runs. An engine that
cannot be installed, fails or takes longer than --timeout-s is listed with the reason, and is not
tried again.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.images.checkpoint import prompt_text
from benchmarks.cpu.images.engines import ENGINES, model_of, prepare
from benchmarks.cpu.images.report import agreement, agreement_lines, summary, tower_lines
from benchmarks.cpu.images.workload import METRICS, WORKLOADS, ImageWorkload, chosen_workload
from benchmarks.cpu.limits import Ceilings, quick_read_bytes_per_s
from benchmarks.cpu.noise import Noise
from benchmarks.cpu.preparation import Unavailable
from benchmarks.cpu.processes import Run, run_driver
from benchmarks.cpu.report import ceiling_lines, legend, ratios, rows_of, table
from benchmarks.cpu.session import Comparison, add_options, chosen_engines, scratch_of, turns
from benchmarks.result_files import Row, write
from quire.tools.report import benchmark_parser, plain_facts


@dataclass
class ImageComparison(Comparison):
    """A comparison by images. texts: first tokens by engine, workload and round."""

    texts: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)

    def measure(self, engine: Engine, workload: ImageWorkload, round_: int) -> None:
        """Run one process. A failure is noted, and not tried again."""
        name = f"{engine.name}: {workload.name}"
        if name in self.failures:
            return
        try:
            runs = self.run(engine, workload, round_)
        except Unavailable as error:
            self.fail(name, error)
            return
        self.runs += runs
        print(*runs, sep="\n", flush=True)

    def run(self, engine: Engine, workload: ImageWorkload, round_: int) -> list[Run]:
        """Run one process, and watch the machine meanwhile. Raises Unavailable."""
        directory = self.scratch.directory
        job = {
            "model": str(model_of(self.scratch, engine, workload.shape)),
            "workload": workload.name,
            "is_small": self.options.small,
            "text": prompt_text(workload, directory / "models" / workload.shape.name),
            "threads": self.options.threads,
            "seed": round_ + 1,
            "options": engine.options | (self.settings if engine.is_ours else {}),
        }
        log = directory / "logs" / f"images-{engine.name}-{workload.name}.log".replace(" ", "-")
        python = self.scratch.python(engine.environment)
        read_bytes_per_s, noise = quick_read_bytes_per_s(self.options.threads), Noise()
        output = run_driver(python, engine.driver, job, log, self.options.timeout_s)
        stolen, key = noise.stolen(), (engine.name, workload.name, round_)
        self.texts[key] = [text for run in output.runs for text in run["texts"]]
        return [
            Run(*key, run["metrics"], run["others"], stolen, read_bytes_per_s)
            for run in output.runs
        ]


def prepared(
    comparison: ImageComparison, engines: list[Engine], workloads: list[ImageWorkload]
) -> list[Engine]:
    """Return the engines that can run."""
    shapes, ready = [workload.shape for workload in workloads], []
    for engine in engines:
        try:
            prepare(comparison.scratch, engine, list(dict.fromkeys(shapes)))
            ready.append(engine)
        except Unavailable as error:
            comparison.fail(engine.name, error)
    return ready


def measure_rounds(
    comparison: ImageComparison, engines: list[Engine], workloads: list[ImageWorkload]
) -> None:
    """Measure all. Ctrl-C ends it; what is there is still shown."""
    comparison.measure_ceilings()
    try:
        for round_ in range(comparison.options.rounds):
            for workload in workloads:
                for engine in turns(engines, round_):
                    comparison.measure(engine, workload, round_)
            comparison.measure_ceilings()
            print(f"round {round_ + 1} of {comparison.options.rounds} is done", flush=True)
    except KeyboardInterrupt:
        comparison.failures["all"] = "interrupted"


def finish(comparison: ImageComparison, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
    """Print the tables. Returns the rows and settings that are written."""
    options = comparison.options
    ceilings = Ceilings.of(comparison.ceilings[str(options.threads)])
    summaries = summary(comparison.runs, engines, ceilings, options.small)
    lines = ["", *ceiling_lines(comparison.ceilings), ""]
    for key in ("best", "median"):
        lines += table(summaries, engines, key, METRICS)
    lines += [*legend(METRICS), "", *tower_lines(summaries, ceilings, options.small), ""]
    lines += agreement_lines(comparison.texts, engines)
    lines += [f"failed: {name}: {reason}" for name, reason in comparison.failures.items()]
    print("\n".join(lines), flush=True)
    runs = [asdict(run) for run in comparison.runs]
    rows = rows_of(summaries, ratios(summaries, engines, metrics=METRICS), runs)
    equal = {engine.name: agreement(comparison.texts, engine.name) for engine in engines}
    rows = [row | {"equal_first_tokens": equal[row["engine"]]} for row in rows]
    return rows, comparison.written_settings(engines)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [workload.name for workload in WORKLOADS]
    add_options(parser)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--timeout-s", type=float, default=900.0, help="of one process; slower ones are left out"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model and small images")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    comparison = ImageComparison(options, scratch_of(options))
    facts, began = plain_facts(), time.monotonic()
    print(f"# {facts['cpu']}, {options.threads} threads; {facts['date']}, commit {facts['commit']}")
    workloads = [chosen_workload(name, options.small) for name in options.workloads]
    engines = prepared(comparison, chosen_engines(ENGINES, options.engines), workloads)
    measure_rounds(comparison, engines, workloads)
    results = finish(comparison, engines)
    print(f"took {(time.monotonic() - began) / 60:.0f} minutes")
    write(options.output_json, "cpu.images", *results, plain_facts)


if __name__ == "__main__":
    main()
