"""Measure how long a device waits for the host while all rows decode, by pipeline depth and step
time.

    python -m benchmarks.scheduler.async_scheduling

The device is virtual (virtual/virtual_device.py). A step starts at the end of the one before it, or
when it is submitted, if that is later. It takes 1 or 5 ms. Everything else is the engine's own.

`server`: the core's process as in `quire serve` (engine/wire/core_server.py). A client in a process
of its own, on another processor core, receives and decodes all messages. `client`: a core and its
client in one thread, as in `LLM`, up to the `RequestOutput`s; without a tokenizer. Depth 1 submits
a step when the one before it has come back; from depth 2 on the next one is already there.

Host time per step, by part: schedule, update, send (encoding and the socket) or client
(`OutputProcessor`); medians, in milliseconds. CPU is all of the thread's time in a step. Of several
rounds the one with the shortest wait of the device counts: other load can only add to it.
"""

import gc
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.result_files import options_of, write
from benchmarks.virtual.dry_run import VOCAB_SIZE, dry_request, dry_run
from benchmarks.virtual.virtual_device import VirtualDevice
from quire.base.clock import MonotonicClock
from quire.base.messages import Ready, Request
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.base.step_outputs import StepOutputs
from quire.engine.client.client import InProcessClient
from quire.engine.client.output import StepReader
from quire.engine.loop.core import EngineCore
from quire.engine.wire.core_server import CoreReports, CoreServer
from quire.engine.wire.wire import Frames, client_codec
from quire.tools.report import benchmark_parser, print_head
from quire.tools.workloads import random_prompts

PROMPT_LEN, BLOCK_SIZE = 128, 16
NUM_WARM = 32  # steps before any is counted; the first one computes all prompts
AIM = 0.02


class StepTimes:
    """Milliseconds of each part of a step, from calls that are timed where they are made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.clock = clock

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        spans, clock = self.ms[part], self.clock

        def call(*arguments: Any) -> Any:
            began = clock()
            try:
                return function(*arguments)
            finally:
                spans.append((clock() - began) * 1e3)

        return call

    def medians(self) -> dict[str, float]:
        """Return medians of the calls that did something: planning is called once more than it
        succeeds."""
        return {part: statistics.median(spans) for part, spans in self.ms.items() if spans}


@contextmanager
def timing(core: EngineCore, parts: StepTimes) -> Iterator[None]:
    """Time the core's parts for the duration of the block."""
    scheduler = core.scheduler
    schedule = scheduler.schedule

    def plan(now: float) -> Any:
        began = parts.clock()
        made = schedule(now)
        if made.plan is not None:
            parts.ms["schedule"].append((parts.clock() - began) * 1e3)
        return made

    scheduler.schedule = plan  # type: ignore[method-assign]
    scheduler.update = parts.timed("update", scheduler.update)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del scheduler.schedule, scheduler.update


def make_core(num_rows: int, depth: int, step_s: float, num_steps: int) -> EngineCore:
    """Return a core with all rows free, and blocks enough for all of them."""
    max_len = PROMPT_LEN + num_steps + NUM_WARM + 64
    config = SchedulerConfig(
        max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN, pipeline_depth=depth
    )
    num_blocks = num_rows * (-(-max_len // BLOCK_SIZE) + 1)
    scheduler, _ = dry_run(num_blocks, BLOCK_SIZE, config, max_len, True)
    limits = RequestLimits(VOCAB_SIZE, max_len, 0, num_rows)
    return EngineCore(scheduler, VirtualDevice(step_s), MonotonicClock(), limits)


def make_requests(num_rows: int, max_len: int) -> list[Request]:
    """Make prompts of 113 to 128 tokens, so that a sixteenth of the rows enters a block in each
    step."""
    prompts = random_prompts(num_rows, PROMPT_LEN, VOCAB_SIZE, seed=1)
    return [
        dry_request(f"chatcmpl-{i:032x}", prompt[i % BLOCK_SIZE :], max_len)
        for i, prompt in enumerate(prompts)
    ]


class Counted:
    """Listens to the core: when the warm-up is over, and when enough steps were counted."""

    def __init__(self, core: EngineCore, num_steps: int, at_end: Callable[[], None]) -> None:
        self.device = core.executor
        self.num_steps, self.at_end = num_steps, at_end
        self.num_taken = 0
        self.idle = self.cpu_ms = 0.0
        self.parts = StepTimes()

    def __call__(self, outputs: StepOutputs) -> None:
        if not outputs:
            return
        self.num_taken += 1
        device = self.device
        assert isinstance(device, VirtualDevice)
        if self.num_taken == NUM_WARM:
            gc.collect()
            gc.freeze()
        elif self.num_taken == NUM_WARM + 4:
            device.reset()
            for spans in self.parts.ms.values():
                spans.clear()
            self.cpu_ms = -time.thread_time() * 1e3
        elif self.num_taken == NUM_WARM + 4 + self.num_steps:
            self.cpu_ms = (self.cpu_ms + time.thread_time() * 1e3) / self.num_steps
            self.idle = device.idle_s / (device.idle_s + device.busy_s)
            self.at_end()


@contextmanager
def on_core(which: int) -> Iterator[None]:
    """Keep this thread on one of the machine's cores, so that a message's reader does not displace
    its sender."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[which]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run_client(num_rows: int, depth: int, step_s: float, num_steps: int) -> Counted:
    core = make_core(num_rows, depth, step_s, num_steps)
    client = InProcessClient(core, None, MonotonicClock())
    done: list[bool] = []
    counted = Counted(core, num_steps, lambda: done.append(True))
    outputs = client._outputs
    outputs.process = counted.parts.timed("client", outputs.process)  # type: ignore[method-assign]
    step = core.step

    def counted_step() -> StepOutputs:
        given = step()
        counted(given)
        return given

    core.step = counted_step  # type: ignore[method-assign]
    for request in make_requests(num_rows, core.limits.max_model_len):
        client.add(request)
    with timing(core, counted.parts):
        while not done:
            client.step()
    core.close()
    return counted


def run_server(num_rows: int, depth: int, step_s: float, num_steps: int) -> Counted:
    core = make_core(num_rows, depth, step_s, num_steps)
    with tempfile.TemporaryDirectory() as home:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{home}/core")
        listener.listen(1)
        ready = Ready(0, VOCAB_SIZE, core.limits.max_model_len, 0, num_rows, {}, "")
        server = CoreServer(core, listener, ready, CoreReports(lambda: ""), MonotonicClock())
        counted = Counted(core, num_steps, server.stop)
        send = counted.parts.timed("send", server._send)

        def counted_send(outputs: StepOutputs) -> None:
            if outputs:
                send(outputs)
            counted(outputs)

        server._send = counted_send  # type: ignore[method-assign]
        arguments = (Path(home) / "core", num_rows, core.limits.max_model_len)
        client = multiprocessing.get_context("spawn").Process(target=be_client, args=arguments)
        client.start()
        with timing(core, counted.parts), on_core(0):
            server.run()
        client.join()
    core.close()
    return counted


def be_client(path: Path, num_rows: int, max_len: int) -> None:
    """Send the requests, then read messages until the core ends."""
    codec, frames, reader = client_codec(), Frames(), StepReader()
    with on_core(-1), socket.socket(socket.AF_UNIX) as core:
        core.connect(str(path))
        core.sendall(b"".join(codec.encode(r) for r in make_requests(num_rows, max_len)))
        num_tokens = 0
        while data := core.recv(1 << 18):
            for body in frames.feed(data):
                message = codec.decode(body)
                if isinstance(message, StepOutputs):
                    num_tokens += len(reader.tokens(message))


RUNS = {"server": run_server, "client": run_client}


def print_line(result: dict[str, Any]) -> None:
    parts = result["host_ms"]
    last = parts.get("send", parts.get("client", 0.0))
    print(
        f"{result['path']:>7} {result['rows']:6,} {result['step_ms']:5.0f} {result['depth']:6}"
        f" {result['idle']:8.1%} {AIM if result['depth'] > 1 else float('nan'):6.0%}"
        f" {parts['schedule']:9.3f} {parts['update']:7.3f}"
        f" {last:12.3f} {result['cpu_ms']:10.3f}",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1, 5])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--paths", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3, help="of which the best one counts")
    parser.add_argument("--seconds", type=float, default=2.0, help="of counted steps, per run")
    options = parser.parse_args()
    print_head("share of the time that a virtual device waits for the host; all rows decode")
    print("   path   rows    ms  depth     idle    aim  schedule  update  send/client   CPU/step")
    results = []
    for path in options.paths:
        for num_rows in options.rows:
            for step_ms in options.step_ms:
                for depth in options.depths:
                    num_steps = int(options.seconds * 1e3 / step_ms)
                    rounds = [
                        RUNS[path](num_rows, depth, step_ms / 1e3, num_steps)
                        for _ in range(options.rounds)
                    ]
                    counted = min(rounds, key=lambda each: each.idle)
                    results.append(
                        {
                            "path": path,
                            "rows": num_rows,
                            "step_ms": step_ms,
                            "depth": depth,
                            "steps": num_steps,
                            "idle": counted.idle,
                            "aim": AIM,
                            "idle_of_rounds": [each.idle for each in rounds],
                            "host_ms": counted.parts.medians(),
                            "cpu_ms": counted.cpu_ms,
                        }
                    )
                    print_line(results[-1])
    write(options.output_json, "scheduler.async_scheduling", results, options_of(options))


if __name__ == "__main__":
    main()
