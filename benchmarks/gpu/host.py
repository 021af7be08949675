"""Piece `host`: a time line of the host, of 20 prompts one after another and of 200 decoding steps.

    client      call |                                          | answer
    core             | queued | planned |            | taken    |
    device                              | step ....... |

Each line is the median and the longest distance between two stations. The device's duration is by
its own events. So the first three distances and the last two are what a request waits for the
host.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.context import Bench
from benchmarks.gpu.engine import decode, engine, generate_tokens, listening
from benchmarks.gpu.report import Row, duration
from benchmarks.gpu.table import LLAMA, SMALL
from benchmarks.gpu.workload import Request, random_requests
from quire.base.events import Event, Planned, Queued, Stepped
from quire.serve.python.llm import LLM

NUM_PROMPTS, NUM_STEPS = 20, 200


@dataclass
class Stations:
    """Listens to a core; keeps the time at which each station was passed."""

    queued_s: float = 0.0
    planned: dict[int, float] = field(default_factory=dict)
    taken: dict[int, tuple[float, float]] = field(default_factory=dict)  # time, device's duration

    def __call__(self, event: Event) -> None:
        match event:
            case Queued():
                self.queued_s = event.at_s
            case Planned():
                self.planned[event.step_id] = event.at_s
            case Stepped():
                self.taken[event.step_id] = event.at_s, event.duration_s

    def steps(self) -> list[tuple[float, float, float]]:
        """Return (planned, taken, device's duration) of each step, in order."""
        both = self.planned.keys() & self.taken.keys()
        return [(self.planned[each], *self.taken[each]) for each in sorted(both)]


def line_of(name: str, values: Iterable[float]) -> Row:
    listed = sorted(values)
    middle = statistics.median(listed)
    return Row(name, middle, detail={"longest": duration(listed[-1]), "of": len(listed)})


def prompt_lines(bench: Bench, llm: LLM, length: int) -> Sequence[Row]:
    """Return the lines of prompts, which have nothing else in flight."""
    found: dict[str, list[float]] = {}
    count = bench.pick(NUM_PROMPTS, 2)
    requests = random_requests(llm.engine.spec.vocab_size, count + 4, length, length, seed=4)
    for number, request in enumerate(requests):
        with listening(llm, Stations()) as log:
            called = time.monotonic()
            generate_tokens(llm, [Request(request.prompt, 1)])
            answered = time.monotonic()
        (planned, taken, device_s), *_ = log.steps()
        if number >= 4:  # before, steps of this size are compiled and recorded
            stations = {
                "call to queued": log.queued_s - called,
                "queued to planned": planned - log.queued_s,
                "planned to taken": taken - planned,
                "the device's part of it": device_s,
                "taken to answered": answered - taken,
            }
            for name, value in stations.items():
                found.setdefault(name, []).append(value)
    return [line_of(f"prompt of {length}, {name}", values) for name, values in found.items()]


def step_lines(bench: Bench, llm: LLM, batch: int) -> Sequence[Row]:
    """Return the lines of decoding steps, planned ahead of the device."""
    context, steps = (40, 4) if bench.is_tiny else (512, NUM_STEPS)
    with listening(llm, Stations()) as log:
        decode(bench, llm, batch, context, steps)
    last = log.steps()[-steps:]
    pairs = list(zip(last, last[1:], strict=False))
    return [
        line_of(f"{batch} rows, taken to taken", (after[1] - before[1] for before, after in pairs)),
        line_of(f"{batch} rows, planned to planned", (b[0] - a[0] for a, b in pairs)),
        line_of(f"{batch} rows, the device's part", (each[2] for each in last)),
    ]


def run(bench: Bench) -> None:
    """Measure a small and a large model."""
    for model in (SMALL,) if bench.is_tiny else (SMALL, LLAMA):
        with engine(bench, model, max_model_len=2304, max_num_seqs=64) as llm:
            for batch in (1,) if bench.is_tiny else (1, 64):
                _add(bench, model, lambda b=batch, m=llm: step_lines(bench, m, b))
            for length in (20,) if bench.is_tiny else (128, 512, 2048):
                _add(bench, model, lambda n=length, m=llm: prompt_lines(bench, m, n))


def _add(bench: Bench, model: str, make: Callable[[], Sequence[Row]]) -> None:
    bench.attempt(model, lambda: [bench.report.add(row) for row in make()])
