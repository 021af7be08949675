"""Compare quire's draft tokens with other engines' on this CPU: the same requests, one at a time.

    python -m benchmarks.cpu.drafts [--tasks copying] [--engines quire] [--categories 16-bit]

The tasks copying, tools and json use the demo model, its chat template, and items that its training
held out. The task repeated uses Qwen3-0.6B's shape, with text that is certain to repeat itself.
Decoding is greedy.

In a round each engine answers all requests in one process, and engines take turns. Within a
process, the plain engine and each drafting method take turns. An engine's answer with drafts is
compared with its own plain answer, token by token. Environments and models are made on demand in
the scratch directory, as by `benchmarks.cpu`. llama.cpp's server has no recipe: --llama-server
names one.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.cpu.draft_report import CATEGORIES, LEGEND, Answered, rows_of, summary, table
from benchmarks.cpu.drivers.drafting import turns
from benchmarks.cpu.engines import FLOAT16, INT8, LLAMA, OPENVINO, Engine
from benchmarks.cpu.preparation import Scratch, Unavailable
from benchmarks.cpu.processes import ROOT, Output, run_driver
from benchmarks.cpu.repeating import write_repeating
from benchmarks.cpu.requests import DEMO, TASKS, Task, requests_of
from benchmarks.cpu.workloads import QWEN, TINY, Shape
from benchmarks.result_files import Row, options_of, write
from quire.tools.report import benchmark_parser, plain_facts

DEMO_HIDDEN = 256
SERVER = "draft_llama_server"
RACERS = [
    Engine("quire bf16", "16-bit", "draft_quire", FLOAT16, options={"dtype": "bfloat16"}),
    Engine("llama.cpp bf16", "16-bit", "draft_llama", FLOAT16, LLAMA, "gguf-bf16"),
    Engine("llama-server bf16", "16-bit", SERVER, FLOAT16, LLAMA, "gguf-bf16"),
    Engine("openvino fp16", "16-bit", "draft_openvino", FLOAT16, OPENVINO, "openvino-fp16"),
    Engine("quire int8", "8-bit", "draft_quire", INT8, options={"quantization": "int8"}),
    Engine("llama.cpp q8_0", "8-bit", "draft_llama", INT8, LLAMA, "gguf-q8_0"),
    Engine("llama-server q8_0", "8-bit", SERVER, INT8, LLAMA, "gguf-q8_0"),
    Engine("openvino int8", "8-bit", "draft_openvino", INT8, OPENVINO, "openvino-int8"),
]


@dataclass
class Race:
    """The results so far. failures: by "engine" or "engine: task"."""

    options: argparse.Namespace
    scratch: Scratch
    answered: list[Answered] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, error: Unavailable) -> None:
        """Note a failure, without the directories of this machine."""
        reason = str(error).replace(str(self.scratch.directory), "SCRATCH")
        self.failures[name] = reason.replace(str(ROOT), ".")
        print(f"{name}: {self.failures[name]}", flush=True)

    @property
    def shape(self) -> Shape:
        """Of the model that repeats itself."""
        return TINY if self.options.small else QWEN

    def model(self, engine: Engine, task: Task) -> Path:
        """Return the path of an engine's form of a task's model. Raises Unavailable."""
        if task.model == "demo":
            return self.scratch.form(engine.source, DEMO, "demo", DEMO_HIDDEN)
        name = f"{self.shape.name}-repeating"
        checkpoint = write_repeating(self.shape, self.scratch.directory / "models" / name)
        return self.scratch.form(engine.source, checkpoint, name, self.shape.hidden)

    def drafters(self, engine: Engine, task: Task) -> dict[str, Any]:
        """Return the draft models for the demo model; peers do not support this form."""
        given = dict(each.split("=", 1) for each in self.options.drafters)
        return {"drafters": given} if engine.is_ours and task.model == "demo" else {}

    def requests_file(self, task: Task) -> Path:
        path = self.scratch.directory / "requests" / f"{task.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        requests_made = requests_of(task, self.options.requests, self.options.tokens)
        path.write_text(json.dumps([asdict(each) for each in requests_made]))
        return path

    def run(self, engine: Engine, task: Task, round_: int) -> None:
        """Run one process. A failure is noted, and its task is skipped from then on."""
        name = f"{engine.name}: {task.name}"
        if name in self.failures:
            return
        job = {
            "model": str(self.model(engine, task)),
            "requests": str(self.requests_file(task)),
            "guesses": self.options.guesses,
            "threads": self.options.threads,
            "round": round_,
            "options": engine.options | self.drafters(engine, task),
        }
        log = self.scratch.directory / "logs" / f"guess-{name}.log".replace(" ", "-")
        try:
            python = self.scratch.python(engine.environment)
            output = run_driver(python, engine.driver, job, log, self.options.timeout_s)
        except Unavailable as error:
            self.fail(name, error)
            return
        self.answered += answered_by(engine, task, round_, output)
        print(f"round {round_ + 1}, {name}: {output.runs[0]['others']:.2f} others", flush=True)


def answered_by(engine: Engine, task: Task, round_: int, output: Output) -> list[Answered]:
    return [
        Answered(engine=engine.name, task=task.name, round=round_, **run) for run in output.runs
    ]


def prepared(race: Race, engines: list[Engine], tasks: list[Task]) -> list[Engine]:
    """Return the engines that can run."""
    ready = []
    for engine in engines:
        try:
            if engine.driver == SERVER:
                if race.options.llama_server is None:
                    raise Unavailable("no program; give one that was built: --llama-server FILE")
                engine = replace(engine, options={"server": str(race.options.llama_server)})
            race.scratch.python(engine.environment)
            for task in tasks:
                race.model(engine, task)
            ready.append(engine)
        except Unavailable as error:
            race.fail(engine.name, error)
    return ready


def run_rounds(race: Race, engines: list[Engine], tasks: list[Task]) -> None:
    """Run the rounds. Ctrl-C ends them; the results so far are still shown."""
    by_name = {engine.name: engine for engine in engines}
    try:
        for round_ in range(race.options.rounds if engines else 0):
            for task in tasks:
                for name in turns(list(by_name), 3 * round_):
                    race.run(by_name[name], task, round_)
    except KeyboardInterrupt:
        race.failures["all"] = "interrupted"


def finish(
    race: Race, engines: list[Engine], tasks: list[Task]
) -> tuple[list[Row], dict[str, Any]]:
    """Print the tables. Returns the rows and settings that are written."""
    summaries = summary(race.answered, engines, tasks)
    failed = [f"failed: {name}: {reason}" for name, reason in race.failures.items()]
    print("\n" + "\n".join([*table(summaries, engines, tasks), *LEGEND, "", *failed]), flush=True)
    environments = {engine.environment for engine in engines if engine.environment}
    settings = options_of(race.options) | {
        "failures": race.failures,
        "versions": {e.name: race.scratch.versions(e) for e in environments},
    }
    return rows_of(summaries, [asdict(each) for each in race.answered]), settings


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    names = [task.name for task in TASKS]
    parser.add_argument("--engines", nargs="+", default=[""], metavar="NAME", help="how they begin")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3, help="0: only prepare")
    parser.add_argument("--requests", type=int, default=4, help="of a task, behind one to warm up")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer that repeats itself")
    parser.add_argument("--guesses", type=int, nargs="+", default=[4], metavar="K")
    parser.add_argument(
        "--drafters", nargs="+", default=[], metavar="METHOD=DIR", help="for quire's demo model"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scratch", type=Path, help="environments and models, kept for next time")
    parser.add_argument(
        "--python", nargs="+", default=[], metavar="NAME=FILE", help="environments made by hand"
    )
    parser.add_argument("--llama-server", type=Path, metavar="FILE")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one process")
    parser.add_argument("--small", action="store_true", help="a small model that repeats itself")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    default = Path(tempfile.gettempdir()) / "quire-bench-cpu"
    pythons = {name: Path(file) for name, _, file in (p.partition("=") for p in options.python)}
    race = Race(options, Scratch((options.scratch or default).resolve(), pythons))
    facts, began = plain_facts(), time.monotonic()
    print(f"# {facts['cpu']}, {options.threads} threads; {facts['date']}, commit {facts['commit']}")
    tasks = [task for task in TASKS if task.name in options.tasks]
    chosen = [e for e in RACERS if e.category in options.categories]
    chosen = [e for e in chosen if e.name.startswith(tuple(options.engines))]
    engines = prepared(race, chosen, tasks)
    run_rounds(race, engines, tasks)
    results = finish(race, engines, tasks)
    print(f"took {(time.monotonic() - began) / 60:.0f} minutes")
    write(options.output_json, "cpu.drafts", *results, plain_facts)


if __name__ == "__main__":
    main()
