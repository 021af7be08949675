"""Reservations as policies of quire's scheduler: concurrent requests, and returned chunks."""

import pytest

from benchmarks.paper.reserving import Max, Oracle, Pow2, Reserving
from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.settings.config import SchedulerConfig

MAX_LEN, NUM_BLOCKS = 64, 16  # of 16 tokens: four chunks of 64


def test_running_requests_are_limited_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 10 and an output of 5 tokens reserve 64, 32 (10 + 8) or 16 slots."""
    monkeypatch.setattr(Reserving, "num_slots", 16 * NUM_BLOCKS)
    monkeypatch.setattr(Reserving, "max_model_len", MAX_LEN)
    for kind, max_running in ((Max, 4), (Pow2, 8), (Oracle, 16)):
        config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)
        scheduler, executor = dry_run(NUM_BLOCKS, 16, config, MAX_LEN, False, make_policy=kind)
        for number in range(40):
            scheduler.add(dry_request(str(number), [5] * 10, 5), 0.0)
        running = []
        while scheduler.num_running or scheduler.num_waiting:
            plan = scheduler.schedule(0.0).plan
            running.append(len(plan.rows))
            executor.submit(plan)
            scheduler.update(executor.next_result(), 0.0)
        assert max(running) <= max_running and running[0] >= max_running - 1, (
            kind
        )  # the watermark's block
        assert sum(running) == 40 * 5, kind
