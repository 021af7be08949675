"""Measure the host time of a decoding step on a GPU, without a GPU: planning, packing, taking the
result.

    python -m benchmarks.scheduler.launching

The device accepts all calls and does nothing. All rows decode, and a sixteenth of them enters a new
block in every step. Figures are medians of the best of several runs. Each number of rows has two
lines:

    torch     calls into CUDA through torch and Triton, which are not made here. `calls` counts 14
              of them at 5 us: the kernel that reads the slot, the graph, events, waits, a copy.
    native    one call into the C++ core, on a driver whose three calls take 5 us each. `calls` is
              their time, which `launch` contains.

`limit`: the shortest step that can hide this, since planning and launching one step must fit into
the one before it. For comparison: the floor of Qwen3-0.6B on an H200 with as many rows (context
512).
"""

import gc
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.plan import Plan
from quire.base.settings.config import SchedulerConfig
from quire.runner.device import Graph, StepClock
from quire.runner.gpu import step_launcher
from quire.runner.gpu.kernel_ops import KernelOps
from quire.runner.gpu.step_launcher import PreparedKernel, arguments_of
from quire.runner.model_runner import ModelRunner
from quire.runner.rows import DeviceRows
from quire.runner.sampling.sampler import Vocabulary
from quire.runner.setup.assemble import empty_rows, make_sampler
from quire.runner.step_ops import Needs
from quire.tools.report import benchmark_parser, print_head
from tests.support.runner.fake_driver import OF_A_STEP, FakeDriver

MAX_LEN, BLOCK_SIZE, VOCAB = 8192, 16, 151_936
FLOOR_MS = {1: 0.29, 32: 0.71, 128: 2.03, 256: 3.88}
STEPS, REPEATS = 400, 3
CALL_US = 5.0
NUM_CALLS = {"torch": 14, "native": 3}


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


class NativeNothing(Nothing):
    """A device whose steps the C++ core launches, on a driver that answers them at once."""

    clock = StepClock()
    stream_address = 1

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.fake = FakeDriver()
        self.driver = self.fake.path
        for call in OF_A_STEP:
            self.fake.cost(call, int(1000 * CALL_US))

    def graph_address(self, graph: Graph) -> int:
        return 1

    def claim_thread(self) -> None: ...


class _Absent:
    """In the place of a backend."""

    can_be_recorded = True
    needs_separate = False

    def prefers_uncut(self, context_lens: Any) -> bool:
        return False


class _Whole:
    """Recorded work that is one graph."""

    graph: Any = None

    def __init__(self, work: Any) -> None:
        self.num_row_slots, self.first, self.second = work.num_row_slots, work.first, work.second
        self.graph = self


class _Runner(ModelRunner):
    """A runner whose recorded steps are whole graphs, though nothing is recorded."""

    def find_recorded(self, plan: Plan, needs: Needs) -> Any:
        found = super().find_recorded(plan, needs)
        return found and _Whole(found)


def prepared(kernel: Any, arguments: tuple[Any, ...], constants: Any) -> PreparedKernel:
    """Return the kernel without compiling it."""
    signature = dict.fromkeys(kernel.arg_names[: len(arguments)], "i32")
    return PreparedKernel(1, 128, 0, arguments_of(signature, arguments))


def make_runner(num_rows: int, path: str) -> ModelRunner:
    device: Any = (NativeNothing if path == "native" else Nothing)(num_rows)
    state = empty_rows(device.device, num_rows, MAX_LEN, 1, BLOCK_SIZE)
    with mock.patch.object(step_launcher, "prepare_kernel", prepared):
        ops = KernelOps(device, state, VOCAB, device if path == "native" else None)
    if path == "native":
        mail = ops.launcher.mail
        device.fake.answer(mail.words_QW, mail.max_rows)
    absent: Any = _Absent()
    sampler = make_sampler((), device, state, ops, Vocabulary(VOCAB))
    runner = _Runner(absent, absent, DeviceRows(device, state, ops), sampler, device)
    runner.record(in_pieces=False)
    return runner


def measure(num_rows: int, path: str) -> dict[str, float]:
    """Return medians in microseconds, and the 99th percentile of the sum."""
    config = SchedulerConfig(num_rows, 8192, pipeline_depth=1)
    blocks = num_rows * (MAX_LEN // BLOCK_SIZE // 8)
    scheduler, _ = dry_run(blocks, BLOCK_SIZE, config, MAX_LEN, True)
    runner, generator = make_runner(num_rows, path), np.random.default_rng(0)
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


def best(num_rows: int, path: str) -> dict[str, float]:
    """Return the figures of the run with the smallest sum, and the sum with the calls."""
    found = min((measure(num_rows, path) for _ in range(REPEATS)), key=_sum)
    calls = CALL_US * NUM_CALLS[path]
    return found | {"calls": calls, "sum": _sum(found) + (calls if path == "torch" else 0.0)}


def _sum(found: dict[str, float]) -> float:
    return found["schedule"] + found["launch"] + found["result"]


def main() -> None:
    options = benchmark_parser(__doc__).parse_args()
    print_head("host time of a decoding step of a GPU, microseconds (medians)")
    names = "schedule", "launch", "result", "calls", "sum", "p99"
    print(f"{'rows':>5} {'path':>6} {' '.join(f'{name:>8}' for name in names)} {'limit':>6}")
    rows = []
    for num_rows, floor_ms in FLOOR_MS.items():
        found = {path: best(num_rows, path) for path in NUM_CALLS}
        for path, us in found.items():
            figures = " ".join(f"{us[name]:8.0f}" for name in names)
            print(f"{num_rows:5} {path:>6} {figures} {1000 * floor_ms:6.0f}", flush=True)
        us, native_us = found["torch"], found["native"]
        row = {"rows": num_rows, "us": us, "native_us": native_us, "floor_us": 1000 * floor_ms}
        rows.append(row)
    write(options.output_json, "scheduler.launching", rows, options_of(options))


if __name__ == "__main__":
    main()
