"""Invariants of a scheduler's owners between two calls, asserted by tests."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.kv.inspection import check_invariants
from quire.kv.manager import KVManager, SequenceBlocks
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import State
from quire.spec.cache_group import STATE


def check_memory(
    memory: Memory,
    rows: Rows,
    lifecycle: Lifecycle,
    others: list[SequenceBlocks],
    on_order: Sequence[Callable[[int], list[int]]],
) -> None:
    """Assert that the reference counts of all blocks equal the tables that list them. others:
    tables held by features. on_order: functions that return the host blocks of a group named by
    orders."""
    alive = [m for s in lifecycle.sequences.values() for m in s.members]
    away = [member.host_blocks for member in alive if member.host_blocks is not None]
    held = [sequence.blocks for sequence in rows.sequences()] + others
    kv: KVManager = memory.kv
    check_invariants(kv, held, away, *on_order)
    for sequence in rows.sequences():
        for table, group in zip(sequence.blocks.tables, kv.groups, strict=True):
            if group.kind == STATE:  # retained states have an order of their own
                continue
            needed = group.first_needed(max(0, sequence.num_kept_tokens))
            assert table.num_dropped <= needed // kv.block_size, (
                "blocks that it may still need were freed"
            )


def check_rows(rows: Rows, lifecycle: Lifecycle, num_in_flight: int) -> None:
    """Assert that every row is free, reserved or taken, and that its numbers are consistent."""
    table, running, order = rows.table, rows.sequences(), rows.running
    groups = {id(s.group): s.group for s in running if s.group is not None}.values()
    unforked = {group for group in groups if group.reserved_rows}
    reserved = [row for group in groups for row in group.reserved_rows]
    assert unforked == lifecycle.unforked, "forks"
    free = rows.free
    assert len({*order, *reserved, *free}) == table.num_rows, "a row was lost"
    num_rows = len(order) + len(reserved) + len(free)
    assert num_rows == table.num_rows, "a row is both free and taken"
    assert (table.computed[order] <= table.total[order]).all(), "computed overtook total"
    assert (table.known[order] <= table.total[order]).all(), "known overtook total"
    assert (table.total[order] <= table.limit[order]).all(), "total overtook the limit"
    pending = table.total[order] - table.known[order] - table.verified[order]
    assert (pending <= num_in_flight).all(), "stray pending"
    assert np.count_nonzero(table.verified) == rows.num_trying, "draft tokens without a row"
    assert (table.capacity[order] >= table.computed[order]).all(), "computed without a slot"
    ranks = [(sequence.priority, sequence.arrival) for sequence in running]
    assert ranks == sorted(ranks), "running rows are out of order"
    for sequence in running:
        tables = sequence.blocks.tables
        assert all(t.num_tokens <= sequence.num_computed_tokens for t in tables), "table length"
        assert len({t.num_tokens for t in tables}) == 1, "the groups' tables differ in length"


def check_lives(rows: Rows, lifecycle: Lifecycle) -> None:
    """Assert that every sequence is where its state says."""
    members = [m for s in lifecycle.sequences.values() for m in s.members]
    alive = [member for member in members if member.state is not State.ENDED]
    running = set(rows.sequences())
    num_queued = 0
    for member in alive:
        assert (member in running) == (member.state is State.RUNNING), "who runs holds a row"
        is_queued = member.state in (State.WAITING, State.SWAPPED)
        is_swapped = member.host_blocks is not None
        assert not is_queued or is_swapped == (member.state is State.SWAPPED), "swapped out"
        assert not member.blockers or member.state is State.PARKED, "runs without what it lacks"
        num_queued += is_queued
    assert num_queued == len(lifecycle.queue), "a sequence was lost, or one that ended waits"
    assert running <= set(alive), "one that has ended runs"
    long_lists = {member for member in alive if member.has_long_stop_list}
    assert long_lists == lifecycle.long_stop_lists, "long stop lists"
    searches = {m.request.request_id for m in alive if m.request.params.use_beam_search}
    assert searches == lifecycle.searches, "beam searches"
