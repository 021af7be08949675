"""Measure the host time of a decoding step on a GPU, without a GPU: planning, packing, taking the
result.

    python -m benchmarks.scheduler.launching

The device accepts all calls and does nothing. So the time includes all of the host's work except
the calls into CUDA. A recorded step makes some ten of them (a kernel that takes the slot, the
graph, events, a copy), about 5 us each. All rows decode, and a sixteenth of them enters a new block
in every step.

`limit`: the shortest step that can hide this, since planning and launching one step must fit into
the one before it. For comparison: the floor of Qwen3-0.6B on an H200 with as many rows (context
512).
"""

import gc
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.settings.config import SchedulerConfig
from quire.runner.gpu.kernel_ops import KernelOps
from quire.runner.model_runner import ModelRunner
from quire.runner.rows import DeviceRows
from quire.runner.sampling.sampler import Vocabulary
from quire.runner.setup.assemble import empty_rows, make_sampler
from quire.tools.report import benchmark_parser, print_head

MAX_LEN, BLOCK_SIZE, VOCAB = 8192, 16, 151_936
FLOOR_MS = {1: 0.29, 32: 0.71, 128: 2.03, 256: 3.88}
STEPS = 400


class _Answer:
    """A result whose tokens are all 1."""

    def __init__(self, num_rows: int) -> None:
        self._tokens = torch.ones(num_rows, dtype=torch.int32)

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[torch.Tensor]:
        return [self._tokens]

    def duration_s(self) -> float:
        return 0.001


class Nothing:
    """A device that accepts all calls and does nothing."""

    is_async = True
    can_capture = True

    def __init__(self, num_rows: int) -> None:
        self.device = torch.device("cpu")
        self._answer = _Answer(num_rows)

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def run(self, work: Any) -> _Answer:
        return self._answer

    def begin_capture(self) -> Any: ...

    def end_capture(self, graph: Any) -> None: ...


class _Absent:
    """In the place of a backend."""

    can_be_recorded = True


def make_runner(num_rows: int) -> ModelRunner:
    device: Any = Nothing(num_rows)
    state = empty_rows(device.device, num_rows, MAX_LEN, 1, BLOCK_SIZE)
    ops = KernelOps(device, state, VOCAB)
    absent: Any = _Absent()
    sampler = make_sampler((), device, state, ops, Vocabulary(VOCAB))
    runner = ModelRunner(absent, absent, DeviceRows(device, state, ops), sampler, device)
    runner.record(in_pieces=False)
    return runner


def measure(num_rows: int) -> dict[str, float]:
    """Return medians in microseconds, and the 99th percentile of the sum."""
    config = SchedulerConfig(num_rows, 8192, pipeline_depth=1)
    blocks = num_rows * (MAX_LEN // BLOCK_SIZE // 8)
    scheduler, _ = dry_run(blocks, BLOCK_SIZE, config, MAX_LEN, True)
    runner, generator = make_runner(num_rows), np.random.default_rng(0)
    for i in range(num_rows):
        prompt = generator.integers(0, VOCAB, 113 + i % 16).tolist()
        scheduler.add(dry_request(f"r{i}", prompt, 800), 0.0)
    times: list[tuple[float, float, float]] = []
    gc.disable()
    while len(times) < STEPS:
        began = time.perf_counter()
        plan = scheduler.schedule(0.0).plan
        planned = time.perf_counter()
        assert plan is not None
        pending = runner.launch(plan)
        launched = time.perf_counter()
        scheduler.update(pending.end(), 0.0)
        ended = time.perf_counter()
        if plan.num_scheduled_tokens == num_rows:
            times.append((planned - began, launched - planned, ended - launched))
    gc.enable()
    columns = list(zip(*times[20:], strict=True))
    sums = sorted(sum(each) for each in times[20:])
    found = {
        name: 1e6 * statistics.median(column)
        for name, column in zip(("schedule", "launch", "result"), columns, strict=True)
    }
    return found | {"p99": 1e6 * sums[int(0.99 * len(sums))]}


def main() -> None:
    options = benchmark_parser(__doc__).parse_args()
    print_head("host time of a decoding step of a GPU, microseconds (medians)")
    names = ("rows", 5), ("schedule", 9), ("launch", 7), ("result", 7), ("sum", 6), ("p99", 6)
    print(" ".join(f"{name:>{width}}" for name, width in (*names, ("limit", 7))))
    found = {}
    for num_rows, floor_ms in FLOOR_MS.items():
        each = found[num_rows] = measure(num_rows)
        total = each["schedule"] + each["launch"] + each["result"]
        print(
            f"{num_rows:5} {each['schedule']:9.0f} {each['launch']:7.0f} {each['result']:7.0f}"
            f" {total:6.0f} {each['p99']:6.0f} {1000 * floor_ms:7.0f}",
            flush=True,
        )
    rows = [{"rows": n, "us": each, "floor_us": 1000 * FLOOR_MS[n]} for n, each in found.items()]
    write(options.output_json, "scheduler.launching", rows, options_of(options))


if __name__ == "__main__":
    main()
