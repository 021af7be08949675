"""An engine with stores saves its cached blocks when it closes, within the time limit."""

from pathlib import Path
from queue import SimpleQueue

import msgspec

from quire.base.clock import FakeClock
from quire.base.kv_orders import (
    KEEP_AT_END_S,
    Answer,
    BlockName,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
)
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.connectors.connections import Connections
from tests.support.engine.failing_core import Bench, prompt
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.scheduler.fake_device import make_request


class SlowWorker:
    """A store worker that takes some seconds on the clock per answer. closed_s: the timeout that
    `close` got."""

    def __init__(self, clock: FakeClock, answer_s: float) -> None:
        self.clock, self.answer_s = clock, answer_s
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self.orders: list[Order] = []
        self.kept: list[BlockName] = []
        self.closed_s: float | None = None

    def submit(self, order: Order) -> None:
        if isinstance(order, LookUp):
            found = [False] * len(order.names)
            self.answers.put(LookedUp(0, order.request_id, found, order.ticket))
        else:
            self.orders.append(order)

    def expire(self, now: float) -> None:
        """Answer one order; called whenever the engine polls for answers."""
        if self.orders:
            order = self.orders.pop(0)
            assert isinstance(order, Keep)
            self.clock.advance(self.answer_s)
            self.kept += [(g, digest) for g, digest, _ in order.items]
            self.answers.put(Kept(0, order.ticket, [True] * len(order.items), 0, 0.0))

    @property
    def next_s(self) -> float:
        return 0.0

    def close(self, timeout_s: float) -> None:
        self.closed_s = timeout_s


def open_bench(tmp_path: Path, answer_s: float, **settings: object) -> tuple[Bench, SlowWorker]:
    bench = Bench(checkpoint("llama"), kv_disk_dir=str(tmp_path), **settings)
    bench.runner.raises = lambda plan: False
    clock = bench.core._clock
    assert isinstance(clock, FakeClock)
    worker = SlowWorker(clock, answer_s)
    bench.core.attach(StoresAttachment(Connections([worker], worker.answers), clock))
    return bench, worker


def test_close_stores_the_blocks_of_running_requests_too(
    tmp_path: Path,
) -> None:
    """It takes the results of the steps in flight and ends the requests first."""
    bench, worker = open_bench(tmp_path, 1.0, pipeline_depth=2)
    bench.add("done", prompt(1, 21), 2)
    bench.finish()
    bench.add("open", prompt(2, 21), 30)
    bench.add("waits", prompt(3, 21), 30)
    bench.step()
    bench.core.advance()
    assert bench.core.scheduler.planner.in_flight, "no step is in flight"
    done = bench.core.scheduler.lifecycle.sequences["open"].digests[:5]
    bench.core.close()
    assert len(done) == 5 and {(0, digest) for digest in done} <= set(worker.kept)
    assert len(set(worker.kept)) >= 10
    assert worker.closed_s == KEEP_AT_END_S - 1.0


def test_close_stores_pinned_prefixes_too(tmp_path: Path) -> None:
    bench, worker = open_bench(tmp_path, 1.0)
    request = make_request("pin", prompt(1, 21), max_tokens=1, temperature=0.0)
    bench.core.add(msgspec.structs.replace(request, pin_s=0.0))
    while bench.core.has_work:
        bench.core.step()
    assert bench.core.prefixes()[0].num_blocks == 6
    bench.core.close()
    assert len(set(worker.kept)) == 5


def test_close_stops_storing_at_the_time_limit(tmp_path: Path) -> None:
    """Host memory has slots for few blocks at a time, so there are many orders."""
    bench, worker = open_bench(tmp_path, 7.0, kv_host_gb=5e-6)
    assert bench.core.scheduler.memory.kv.tier is not None
    num_at_once = bench.core.scheduler.memory.kv.tier.limits[0]
    assert num_at_once < 4
    bench.add("r", prompt(1, 60), 2)
    bench.finish()
    bench.core.close()
    assert worker.clock.now() < KEEP_AT_END_S + worker.answer_s
    assert 0 < len(worker.kept) <= 5 * num_at_once < 15
    assert worker.closed_s == 0.0


def test_failed_engine_stores_no_blocks(tmp_path: Path) -> None:
    bench, worker = open_bench(tmp_path, 1.0)
    bench.add("r", prompt(1, 21), 2)
    bench.finish()
    bench.core._death = "the device is gone"
    bench.core.close()
    assert not worker.kept and worker.closed_s == KEEP_AT_END_S
