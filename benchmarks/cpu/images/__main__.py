"""Compare quire with other engines by images on this CPU, with the limits that the run measures.

    python -m benchmarks.cpu.images [--engines quire openvino] [--workloads first] [--scratch DIR]

first: the time to the first token for a picture of 1,024 x 1,024 pixels and 64 text tokens. The
model has Qwen3-VL-2B's shape and random weights. stream: images per second of different pictures,
until each has its first token. Its model has the same vision tower and three small text layers.

Pictures are in memory. Times include preprocessing, but not the decoding of image files. Answers
are greedy.

Each engine has an environment of its own. Environments and models are made on demand in the scratch
directory. Each round runs each workload by each engine in turn, one process each. The first tokens
are compared with transformers'. The best and the median come from runs with at most 0.15 cores of
other load. If there are none, all runs count. An engine that cannot be installed, fails or takes
longer than --timeout-s is listed with the reason, and is not tried again.
"""

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
from benchmarks.cpu.session import Comparison, arguments, scratch_of
from benchmarks.result_files import Row, write
from quire.tools.report import plain_facts


@dataclass
class ImageComparison(Comparison[ImageWorkload]):
    """A comparison by images. texts: first tokens by engine, workload and round."""

    texts: dict[tuple[str, str, int], list[str]] = field(default_factory=dict)

    def prepare(self, engine: Engine, workloads: list[ImageWorkload]) -> None:
        """See Comparison."""
        shapes = dict.fromkeys(workload.shape for workload in workloads)
        prepare(self.scratch, engine, list(shapes))

    def measure(self, engine: Engine, workload: ImageWorkload, round_: int) -> None:
        """See Comparison."""
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

    def finish(self, engines: list[Engine]) -> tuple[list[Row], dict[str, Any]]:
        """See Comparison."""
        options = self.options
        ceilings = Ceilings.of(self.ceilings[str(options.threads)])
        summaries = summary(self.runs, engines, ceilings, options.small)
        lines = ["", *ceiling_lines(self.ceilings), ""]
        for key in ("best", "median"):
            lines += table(summaries, engines, key, METRICS)
        lines += [*legend(METRICS), "", *tower_lines(summaries, ceilings, options.small), ""]
        lines += agreement_lines(self.texts, engines)
        lines += [f"failed: {name}: {reason}" for name, reason in self.failures.items()]
        print("\n".join(lines), flush=True)
        runs = [asdict(run) for run in self.runs]
        rows = rows_of(summaries, ratios(summaries, engines, metrics=METRICS), runs)
        equal = {engine.name: agreement(self.texts, engine.name) for engine in engines}
        rows = [row | {"equal_first_tokens": equal[row["engine"]]} for row in rows]
        return rows, self.written_settings(engines)


def main() -> None:
    names = [workload.name for workload in WORKLOADS]
    options = arguments(__doc__, names, 900.0, "a tiny model and small images")
    workloads = [chosen_workload(name, options.small) for name in options.workloads]
    results = ImageComparison(options, scratch_of(options)).compare(ENGINES, workloads)
    write(options.output_json, "cpu.images", *results, plain_facts)


if __name__ == "__main__":
    main()
