"""What must hold of a scheduler between two calls; for tests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def check_invariants(scheduler: "Scheduler") -> None:
    """Assert that counters, rows and blocks agree."""
    table, running = scheduler.table, scheduler.running()
    alive = [m for s in scheduler.sequences.values() for m in scheduler.members(s)]
    away = [member.host_blocks for member in alive if member.host_blocks is not None]
    stores = [] if scheduler.stores is None else [scheduler.stores.held_blocks]
    alive_blocks = [sequence.blocks for sequence in running] + scheduler.pins.tables()
    scheduler.kv.check_invariants(alive_blocks, away, *stores)
    rows = scheduler._running
    groups = {id(s.group): s.group for s in running if s.group is not None}.values()
    held = [row for group in groups for row in group.reserved_rows]
    assert sum(bool(group.reserved_rows) for group in groups) == scheduler.num_unforked, "forks"
    assert len({*rows, *held, *scheduler._free_rows}) == table.num_rows, "a row was lost"
    num_rows = len(rows) + len(held) + len(scheduler._free_rows)
    assert num_rows == table.num_rows, "a row is both free and taken"
    assert (table.computed[rows] <= table.total[rows]).all(), "computed overtook total"
    assert (table.known[rows] <= table.total[rows]).all(), "known overtook total"
    assert (table.total[rows] <= table.limit[rows]).all(), "total overtook the limit"
    assert (table.total[rows] - table.known[rows] <= len(scheduler.flights)).all(), "stray pending"
    assert (table.capacity[rows] >= table.computed[rows]).all(), "computed without a slot"
    ranks = [(sequence.priority, sequence.arrival) for sequence in running]
    assert ranks == sorted(ranks), "running rows are out of order"
    for sequence in running:
        tables = sequence.blocks.tables
        assert all(t.num_tokens <= sequence.num_computed_tokens for t in tables), "table length"
        assert len({t.num_tokens for t in tables}) == 1, "the groups' tables differ in length"
    num_alive = sum(member.finish_reason is None for member in alive)
    num_aside = sum(member.is_aside for member in alive if member.finish_reason is None)
    assert num_alive == len(running) + len(scheduler.queue) + num_aside, "a sequence was lost"
