"""The end of an engine with stores: cached blocks are kept, within the time limit."""

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
    """Each answer takes some seconds on the clock. closed_s: what it was given for the end."""

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
        """Called whenever somebody looks for answers."""
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


def opened(tmp_path: Path, answer_s: float, **settings: object) -> tuple[Bench, SlowWorker]:
    bench = Bench(checkpoint("llama"), kv_disk_dir=str(tmp_path), **settings)
    bench.runner.raises = lambda plan: False
    clock = bench.core._clock
    assert isinstance(clock, FakeClock)
    worker = SlowWorker(clock, answer_s)
    bench.core.attach(StoresAttachment(Connections([worker], worker.answers), clock))
    return bench, worker


def test_steps_in_flight_are_taken_and_open_requests_end_so_that_their_blocks_are_kept(
    tmp_path: Path,
) -> None:
    bench, worker = opened(tmp_path, 1.0, pipeline_depth=2)
    bench.add("done", prompt(1, 21), 2)
    bench.finish()
    bench.add("open", prompt(2, 21), 30)
    bench.add("waits", prompt(3, 21), 30)
    bench.step()
    bench.core.advance()
    assert bench.core.scheduler.planner.in_flight, "nothing is in flight"
    done = bench.core.scheduler.lifecycle.sequences["open"].digests[:5]
    bench.core.close()
    assert len(done) == 5 and {(0, digest) for digest in done} <= set(worker.kept)
    assert len(set(worker.kept)) >= 10
    assert worker.closed_s == KEEP_AT_END_S - 1.0


def test_pinned_prefixes_are_kept_too(tmp_path: Path) -> None:
    bench, worker = opened(tmp_path, 1.0)
    request = make_request("pin", prompt(1, 21), max_tokens=1, temperature=0.0)
    bench.core.add(msgspec.structs.replace(request, pin_s=0.0))
    while bench.core.has_work:
        bench.core.step()
    assert bench.core.prefixes()[0].num_blocks == 6
    bench.core.close()
    assert len(set(worker.kept)) == 5


def test_all_of_it_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    """Host memory for one block at a time, so there are many orders."""
    bench, worker = opened(tmp_path, 7.0, kv_host_gb=5e-6)
    assert bench.core.scheduler.memory.kv.tier is not None
    num_at_once = bench.core.scheduler.memory.kv.tier.limits[0]
    assert num_at_once < 4
    bench.add("r", prompt(1, 60), 2)
    bench.finish()
    bench.core.close()
    assert worker.clock.now() < KEEP_AT_END_S + worker.answer_s
    assert 0 < len(worker.kept) <= 5 * num_at_once < 15
    assert worker.closed_s == 0.0


def test_an_engine_that_has_failed_keeps_nothing(tmp_path: Path) -> None:
    bench, worker = opened(tmp_path, 1.0)
    bench.add("r", prompt(1, 21), 2)
    bench.finish()
    bench.core._death = "the device is gone"
    bench.core.close()
    assert not worker.kept and worker.closed_s == KEEP_AT_END_S
