"""Frames of a core's state are made only while a client watches, at a limited rate, and
complete."""

from typing import Any

import pytest

from quire.base.live import BlockEvent, LiveState
from quire.engine.observability import live
from quire.engine.observability.live import MAX_EVENTS, LiveFrames
from quire.kv.pool import BlockPool
from tests.support.scheduler.pinning_core import BLOCK, Bench
from tests.support.scheduler.watched_scheduler import random_run

LINE = list(range(17))  # four full blocks and a token


def watch(bench: Bench) -> LiveFrames:
    return LiveFrames(bench.core, bench.clock)


def test_no_frame_is_made_without_a_watcher(monkeypatch: Any) -> None:
    made = []
    original = type(Bench().scheduler).live_state

    def counted(scheduler: Any) -> LiveState:
        made.append(1)
        return original(scheduler)

    monkeypatch.setattr(type(Bench().scheduler), "live_state", counted)
    bench = Bench()
    frames = watch(bench)
    bench.add("before", LINE, 20)
    bench.step()
    assert not made and not frames._is_listening
    frames.frame()
    assert len(made) == 1 and frames._is_listening
    bench.step()
    assert len(made) == 1, "a frame was made without a request for it"
    bench.clock.advance(live.IDLE_S + 1)
    bench.step()
    assert not frames._is_listening
    num_steps = len(frames.frame().steps)
    assert num_steps == 0, "the frame has steps from a time without watchers"


def test_frames_are_made_at_most_five_times_a_second() -> None:
    bench = Bench()
    frames = watch(bench)
    bench.add("one", LINE, 20)
    first = frames.frame()
    bench.step()
    assert frames.frame() is first
    bench.clock.advance(live.FRAME_S)
    second = frames.frame()
    assert (second.number, len(second.state.running)) == (first.number + 1, 1)


def test_slow_frames_are_made_less_often(monkeypatch: Any) -> None:
    bench = Bench()
    frames = watch(bench)
    state = bench.scheduler.live_state

    def slow() -> LiveState:
        bench.clock.advance(0.05)
        return state()

    monkeypatch.setattr(bench.scheduler, "live_state", slow)
    first = frames.frame()
    bench.clock.advance(0.05 * (live.ONE_IN - 2))
    assert frames.frame() is first
    bench.clock.advance(0.05)
    assert frames.frame() is not first


def test_one_delayed_frame_does_not_block_later_ones(monkeypatch: Any) -> None:
    """For example, the garbage collector may delay a frame by half a second."""
    bench = Bench()
    frames = watch(bench)
    state = bench.scheduler.live_state
    with monkeypatch.context() as patch:
        patch.setattr(bench.scheduler, "live_state", lambda: bench.clock.advance(0.5) or state())
        first = frames.frame()
    bench.clock.advance(live.MAX_PAUSE_S - 1.0)
    assert frames.frame() is first
    bench.clock.advance(1.0)
    assert frames.frame().number == first.number + 1


def test_hit_and_copy_events_name_their_blocks() -> None:
    bench = Bench()
    frames = watch(bench)
    frames.frame()
    bench.add("one", LINE, 1)
    bench.finish()
    bench.add("again", LINE, 8, n=2, seed=1)
    for _ in range(4):
        bench.step()
    bench.clock.advance(1.0)
    frame = frames.frame()
    started = next(plan for plan in bench.plans if plan.started[0:] and plan.step_id > 0)
    hits = [event.block for event in frame.events if event.kind == "hit"]
    sequence = bench.sequence("again")
    assert hits == sequence.blocks.tables[0].blocks[: len(LINE) // BLOCK]
    assert started.started[0].num_computed_tokens == 16
    copies = [event.block for event in frame.events if event.kind == "copy"]
    moved = [m for plan in bench.plans for m in plan.moves]
    assert len(copies) == 1 and copies == [int(b) for m in moved for b in m.destination]
    assert (frame.counts["hit"], frame.counts["copy"]) == (4, 1)


def test_long_hit_creates_events_only_for_the_blocks_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def noted(number: int, kind: str, group: int, block: int) -> BlockEvent:
        made.append(block)
        return BlockEvent(number, kind, group, block)

    monkeypatch.setattr(live, "BlockEvent", noted)
    tally = live.LiveTally()
    tally._record("copy", 0, [7])
    tally._record("hit", 0, list(range(3 * MAX_EVENTS)))
    assert made == [7, *range(2 * MAX_EVENTS, 3 * MAX_EVENTS)]
    assert [event.block for event in tally.events] == made[1:]
    assert [event.number for event in tally.events][-1] == 1 + 3 * MAX_EVENTS
    tally._record("copy", 0, [8])
    assert tally.events[-1].number == 2 + 3 * MAX_EVENTS
    assert tally.counts == {"copy": 2, "hit": 3 * MAX_EVENTS}


def test_steps_events_and_counts_match_a_random_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unindex, evict, num_lost = BlockPool.unindex, BlockPool._evict, [0]

    def counted(pool: BlockPool, block_id: int) -> None:
        num_lost[0] += pool.is_indexed(block_id)
        unindex(pool, block_id)

    def counted_all(pool: BlockPool, blocks: list[int]) -> None:
        num_lost[0] += len(blocks)
        evict(pool, blocks)

    monkeypatch.setattr(BlockPool, "unindex", counted)
    monkeypatch.setattr(BlockPool, "_evict", counted_all)
    frames, moved, num_tokens, last = None, {"swap_out": 0, "load": 0, "copy": 0}, 0, 0
    for bench in random_run(3, 200, preemption_mode="swap"):
        if frames is None:
            frames = watch(bench)
            frames.frame()
            last = len(bench.plans)
    assert frames is not None
    for plan in bench.plans[last:]:
        num_tokens += plan.num_scheduled_tokens
        for move in plan.moves:
            moved[str(move.kind)] += len(move.source)
    bench.clock.advance(1.0)
    frame = frames.frame()
    steps = frame.steps
    assert sum(step.prefill_tokens + step.decode_tokens for step in steps) == num_tokens
    assert [step.number for step in steps] == [plan.step_id for plan in bench.plans[last:]]
    assert all(frame.counts.get(kind, 0) == num for kind, num in moved.items())
    assert moved["swap_out"] > 0 and moved["copy"] > 0
    assert frame.counts["preemption"] > 0
    assert frame.counts["eviction"] == num_lost[0] > 0
    numbers = [event.number for event in frame.events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
