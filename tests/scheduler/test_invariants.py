"""Invariants between two calls: a lost block is noticed, whatever should own it."""

import pytest

from quire.base.messages import Hold
from quire.scheduler.core.queue import Fifo
from tests.scheduler.test_held import HeldBench
from tests.scheduler.test_policies import add, scheduler_of


def test_a_block_that_nobody_holds_is_noticed() -> None:
    for place in ("pools", "host_pools"):
        scheduler = scheduler_of(Fifo)
        add(scheduler, "r", 9)
        scheduler.schedule(0.0)
        scheduler.check_invariants()
        [pool] = getattr(scheduler.memory.kv, place)
        pool.allocate()
        with pytest.raises(AssertionError):
            scheduler.check_invariants()


def test_a_block_that_a_row_holds_and_the_pool_has_free_is_noticed() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "r", 9)
    scheduler.schedule(0.0)
    [row] = scheduler.rows.sequences()
    scheduler.memory.kv.pools[0].release(row.blocks.tables[0].blocks[-1])
    with pytest.raises(AssertionError):
        scheduler.check_invariants()


def test_blocks_of_what_is_held_are_counted() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.scheduler.check_invariants()
    bench.scheduler.retained.standing.remove(held)
    with pytest.raises(AssertionError):
        bench.scheduler.check_invariants()
    bench.scheduler.retained.standing.append(held)
    bench.core.control(Hold("a", 0.0))
    bench.scheduler.check_invariants()
