"""Measure the cost of KV events in the core's thread: schedule() + update() with and without, in
turn.

    python -m benchmarks.scheduler.kv_events

One scheduler over one prefix cache, in turn watched for a few steps and not. `steady`: all rows
decode, so a sixteenth of them fills a block in every step. `churn`: in every step some requests end
and as many arrive, with prefix hits, in a pool so small that blocks are evicted. The device is a
pause of --device-ms after each plan. The publisher's thread can encode and send in it, as it can
while a model runs. A subscriber in another process takes everything.

`median`, `mean`: the added time of the core's thread, of schedule + update. `of step`: the mean, as
a share of the whole step with the device's pause.
"""

import gc
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.result_files import options_of, write
from benchmarks.scheduler.recording import BLOCK_SIZE, PROMPT_LEN, requests, share, times_of
from benchmarks.virtual.dry_run import RandomExecutor, dry_run
from quire.base.messages import Request
from quire.base.settings.config import SchedulerConfig
from quire.base.settings.kv_events import KVEventsConfig
from quire.engine.attachments.event_encoding import EventMaker
from quire.engine.attachments.event_publisher import EventPublisher
from quire.engine.attachments.kv_events import KVEvents
from quire.engine.loop.attachment import Given
from quire.scheduler.decisions import Decisions
from quire.scheduler.reuse.index_changes import IndexWatch
from quire.scheduler.scheduler import Scheduler, Topic
from quire.tools.report import benchmark_parser, print_head

AIM = 0.01
TURN = 16  # steps in a row: several times as long as the publisher gathers


@dataclass
class Load:
    """A scheduler, KV events of it, and the times of steps with and without them, ms."""

    scheduler: Scheduler
    executor: RandomExecutor
    events: KVEvents
    keeps_tokens: bool
    requests: Iterator[Request]
    num_arrivals: int
    plain_ms: list[float] = field(default_factory=list)
    told_ms: list[float] = field(default_factory=list)

    def watch(self, is_on: bool) -> None:
        """Switch the watching itself on or off, which an engine does once."""
        memory = self.scheduler.memory
        memory.listeners = [each for each in memory.listeners if not isinstance(each, IndexWatch)]
        memory._connect()
        self.scheduler._collectors = []
        for pool in memory.kv.pools:
            pool.changes = None
        if is_on:
            self.scheduler.subscribe(Topic.INDEX, self.keeps_tokens)

    def step(self, is_published: bool, num_arrivals: int, device_s: float) -> None:
        def hear(given: Given, decisions: Decisions) -> Decisions:
            if is_published:
                self.events.hear(given, decisions)
            return decisions

        scheduler = self.scheduler
        for _ in range(num_arrivals):
            request = next(self.requests)
            hear(request, scheduler.add(request, 0.0))
        began = time.perf_counter()
        plan = hear(None, scheduler.schedule(0.0)).plan
        spent = time.perf_counter() - began
        assert plan is not None
        self.executor.submit(plan)
        result = self.executor.next_result()
        if device_s:
            time.sleep(device_s)
        began = time.perf_counter()
        hear(result, scheduler.update(result, 0.0))
        spent += time.perf_counter() - began
        (self.told_ms if is_published else self.plain_ms).append(spent * 1e3)


def listen(endpoint: str) -> None:
    """Take all that is published, until this process is ended."""
    import zmq

    sub = zmq.Context().socket(zmq.SUB)
    sub.connect(endpoint)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    while True:
        sub.recv_multipart()


def compare(
    num_rows: int, churns: bool, keeps_tokens: bool, num_steps: int, device_s: float
) -> dict[str, Any]:
    """Return the results of one line."""
    max_len = 2 * PROMPT_LEN + 2 * num_steps + 64
    longest = 2 * PROMPT_LEN + 96 if churns else max_len
    num_blocks = num_rows * (-(-longest // BLOCK_SIZE) + 1)
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows * PROMPT_LEN)
    scheduler, executor = dry_run(num_blocks, BLOCK_SIZE, config, max_len, True)
    maker = EventMaker(scheduler.memory.kv.groups, BLOCK_SIZE, 0)
    publisher = EventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:0"), maker.encode)
    listener = multiprocessing.get_context("spawn").Process(
        target=listen, args=(publisher.endpoint,), daemon=True
    )
    listener.start()
    events = KVEvents(publisher)
    num_arrivals = num_rows // 64 if churns else 0
    stream = requests(num_rows, churns, max_len)
    load = Load(scheduler, executor, events, keeps_tokens, stream, num_arrivals)
    load.step(False, num_rows, 0.0)
    for _ in range(64):
        load.step(False, num_arrivals, 0.001)
    load.plain_ms.clear()
    gc.collect()
    for turn in range(2 * num_steps // TURN):
        is_published = bool((turn + turn // 2) % 2)
        load.watch(is_published)
        for _ in range(TURN):
            load.step(is_published, num_arrivals, device_s)
    events.close()
    listener.terminate()
    listener.join()
    plain, published = times_of(load.plain_ms), times_of(load.told_ms)
    return {
        "rows": num_rows,
        "load": "churn" if churns else "steady",
        "tokens": keeps_tokens,
        "device_ms": device_s * 1e3,
        "plain_ms": plain,
        "told_ms": published,
        "of_step": (published["mean"] - plain["mean"]) / (plain["mean"] + device_s * 1e3),
    }


def print_line(line: dict[str, Any]) -> None:
    print(
        f"{line['rows']:6,} {line['load']:>7} {line['tokens']!s:>7} {line['device_ms']:7.1f}"
        f" {line['plain_ms']['median']:8.3f} {line['told_ms']['median']:8.3f}"
        f" {share(line, 'median', 'told_ms'):8.1%} {share(line, 'mean', 'told_ms'):8.1%}"
        f" {line['of_step']:8.2%} {AIM:6.0%}",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.0, 5.0])
    options = parser.parse_args()
    print_head("KV events: schedule + update per step, milliseconds")
    print("  rows    load  tokens  device    plain     told   median     mean  of step    aim")
    results = []
    for num_rows in options.rows:
        for churns in (False, True):
            for keeps_tokens in (False, True):
                for device_ms in options.device_ms:
                    line = compare(num_rows, churns, keeps_tokens, options.steps, device_ms / 1e3)
                    print_line(line)
                    results.append(line)
    write(options.output_json, "scheduler.kv_events", results, options_of(options) | {"aim": AIM})


if __name__ == "__main__":
    main()
