"""Measure the cost of recording: schedule() + update() with and without it, step by step in turn.

    python -m benchmarks.scheduler.recording

One scheduler runs a few steps with the recorder, and a few without, in turn. (Two schedulers would
differ by more than the cost, by the addresses of their arrays.) `steady`: all rows decode; their
lengths are spread, so a sixteenth of the rows enters a new block in every step. `churn`: in every
step some requests end and as many arrive, with prefix hits. The device is a pause of --device-ms
after each plan. The writing thread can work in it, as it does while a model runs; 0 leaves it no
pause at all.

`median`, `mean`: the added time of the core's thread. `writer`: processor time of the other thread
per step, during the device's time. `bytes/step`: written bytes. `snapshot`: the core's pause when a
segment begins.
"""

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE, RandomExecutor, dry_request, dry_run
from quire.base.messages import Request
from quire.base.settings.config import SchedulerConfig
from quire.engine.attachments.recorder import Recorder
from quire.engine.loop.attachment import Doors
from quire.scheduler.scheduler import Scheduler
from quire.tools.report import benchmark_parser, print_head

BLOCK_SIZE = 16
PROMPT_LEN = 128
AIM = 0.03
TURN = 4  # steps in a row of one of the two


@dataclass
class Load:
    """A scheduler with a recorder, and the times of the steps with and past it, in ms."""

    scheduler: Scheduler
    executor: RandomExecutor
    recorder: Recorder
    requests: Iterator[Request]
    num_arrivals: int
    plain_ms: list[float] = field(default_factory=list)
    recorded_ms: list[float] = field(default_factory=list)

    def step(self, is_recorded: bool, num_arrivals: int, device_s: float) -> None:
        doors: Doors = self.recorder if is_recorded else self.scheduler
        arriving = [next(self.requests) for _ in range(num_arrivals)]
        began = time.perf_counter()
        for request in arriving:
            doors.add(request, 0.0)
        plan = doors.schedule(0.0).plan
        spent = time.perf_counter() - began
        assert plan is not None
        self.executor.submit(plan)
        result = self.executor.next_result()
        if device_s:
            time.sleep(device_s)
        began = time.perf_counter()
        doors.update(result, 0.0)
        spent += time.perf_counter() - began
        (self.recorded_ms if is_recorded else self.plain_ms).append(spent * 1e3)


def requests(num_rows: int, churns: bool, max_len: int) -> Iterator[Request]:
    """Yield requests. Steady: prompts of 113 to 128 tokens with endless answers. Churn: half of
    each prompt is one of eight prefixes, and 32 to 95 tokens follow."""
    rng = np.random.default_rng(1)
    prefixes = rng.integers(0, VOCAB_SIZE, (8, PROMPT_LEN // 2))
    for number in range(1 << 40):
        own = rng.integers(0, VOCAB_SIZE, PROMPT_LEN // 2 - number % BLOCK_SIZE)
        prompt = [*prefixes[number % 8].tolist(), *own.tolist()]
        length = int(rng.integers(32, 96)) if churns else max_len
        yield dry_request(str(number), prompt, length)


def make_load(num_rows: int, num_steps: int, churns: bool, directory: Path) -> Load:
    max_len = 2 * PROMPT_LEN + 2 * num_steps + 64
    num_blocks = num_rows * (-(-max_len // BLOCK_SIZE) + 1)
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN)
    scheduler, executor = dry_run(num_blocks, BLOCK_SIZE, config, max_len, True)
    recorder = Recorder(scheduler, directory, 10_000_000_000)
    num_arrivals = num_rows // 64 if churns else 0
    stream = requests(num_rows, churns, max_len)
    load = Load(scheduler, executor, recorder, stream, num_arrivals)
    load.step(True, num_rows, 0.0)
    for _ in range(64):
        load.step(True, num_arrivals, 0.001)
    load.recorded_ms.clear()
    return load


def compare(num_rows: int, churns: bool, num_steps: int, device_s: float) -> dict[str, Any]:
    """Return the results of one line."""
    directory = Path(tempfile.mkdtemp(prefix="recording-"))
    load = make_load(num_rows, num_steps, churns, directory)
    recorder = load.recorder
    gc.collect()
    cpu_s, num_bytes = recorder._writer.cpu_s, _size(directory)
    for turn in range(2 * num_steps // TURN):
        is_recorded = bool((turn + turn // 2) % 2)
        for _ in range(TURN):
            load.step(is_recorded, load.num_arrivals, device_s)
    assert recorder.is_recording, "the writer did not keep up"
    time.sleep(0.2)  # the writer finishes what is in the queue
    cpu_s, num_bytes = recorder._writer.cpu_s - cpu_s, _size(directory) - num_bytes
    recorder.begin_segment()
    began = time.perf_counter()
    recorder.schedule(0.0)
    snapshot_ms = (time.perf_counter() - began) * 1e3
    recorder.close()
    shutil.rmtree(directory)
    return {
        "rows": num_rows,
        "load": "churn" if churns else "steady",
        "device_ms": device_s * 1e3,
        "plain_ms": times_of(load.plain_ms),
        "recorded_ms": times_of(load.recorded_ms),
        "writer_ms": cpu_s * 1e3 / num_steps,
        "bytes_per_step": num_bytes / num_steps,
        "snapshot_ms": snapshot_ms,
    }


def times_of(ms: list[float]) -> dict[str, float]:
    """Return median, mean and maximum of some steps' milliseconds."""
    cut = sorted(ms)[: int(0.98 * len(ms))]  # without what the machine did to a few of them
    return {"median": statistics.median(ms), "mean": statistics.mean(cut), "max": max(ms)}


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def share(line: dict[str, Any], kind: str, changed: str = "recorded_ms") -> float:
    """Return how much more the steps called `changed` take than plain ones. kind: of times."""
    return float(line[changed][kind] / line["plain_ms"][kind] - 1)


def print_line(line: dict[str, Any]) -> None:
    print(
        f"{line['rows']:6,} {line['load']:>7} {line['device_ms']:7.1f}"
        f" {line['plain_ms']['median']:8.3f} {line['recorded_ms']['median']:9.3f}"
        f" {share(line, 'median'):8.1%} {share(line, 'mean'):8.1%} {AIM:6.0%}"
        f" {line['writer_ms']:8.3f} {line['bytes_per_step']:8,.0f} {line['snapshot_ms']:9.1f}",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.0, 5.0])
    options = parser.parse_args()
    print_head("recording: schedule + update per step, milliseconds")
    print(
        "  rows    load  device    plain  recorded   median     mean    aim   writer  bytes/step"
        "  snapshot"
    )
    results = []
    for num_rows in options.rows:
        for churns in (False, True):
            for device_ms in options.device_ms:
                line = compare(num_rows, churns, options.steps, device_ms / 1e3)
                print_line(line)
                results.append(line)
    write(options.output_json, "scheduler.recording", results, options_of(options) | {"aim": AIM})


if __name__ == "__main__":
    main()
