"""Invariants between two calls: a lost block is detected, whatever should own it."""

import pytest

from quire.base.messages import Hold
from quire.scheduler.core.queue import Fifo
from tests.scheduler.test_held import HeldBench
from tests.scheduler.test_policies import add, scheduler_of


def test_an_allocated_block_without_an_owner_is_detected() -> None:
    for place in ("pools", "host_pools"):
        scheduler = scheduler_of(Fifo)
        add(scheduler, "r", 9)
        scheduler.schedule(0.0)
        scheduler.check_invariants()
        [pool] = getattr(scheduler.memory.kv, place)
        pool.allocate()
        with pytest.raises(AssertionError):
            scheduler.check_invariants()


def test_a_free_block_that_a_row_holds_is_detected() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "r", 9)
    scheduler.schedule(0.0)
    [row] = scheduler.rows.sequences()
    scheduler.memory.kv.pools[0].release(row.blocks.tables[0].blocks[-1])
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_blocks_of_retained_requests_are_counted() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.scheduler.check_invariants()
    bench.scheduler.retained.standing.remove(held)
    with pytest.raises(AssertionError):
        bench.scheduler.check_invariants()
    bench.scheduler.retained.standing.append(held)
    bench.core.control(Hold("a", 0.0))
    bench.scheduler.check_invariants()
