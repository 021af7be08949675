"""Whether a preempted sequence is swapped out or recomputed."""

from types import SimpleNamespace

import pytest

from quire.base.events import Preempted
from quire.base.messages import Abort, MeasuredRates
from quire.base.plan import MoveKind
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.preemption import Preemption
from quire.scheduler.core.queue import Fifo
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import expected_tokens
from tests.support.scheduler.pinning_core import MAX_LEN, PREFIX, Bench
from tests.support.scheduler.plain_scheduler import add, step


@pytest.mark.parametrize(
    ("bytes_per_s", "is_cheaper"), [(1500, False), (1600, False), (1601, True)]
)
def test_swapping_is_chosen_if_it_is_cheaper_than_recomputing(
    bytes_per_s: float, is_cheaper: bool
) -> None:
    """Three samples of 30 tokens share a prompt of 20: 50 tokens to compute, in 0.5 s; or 4 blocks
    of 100 bytes there and back."""
    member = SimpleNamespace(blocks=None, num_computed_tokens=30, num_prompt_tokens=20)
    memory = SimpleNamespace(
        rates=MeasuredRates(prefill_tokens_per_s=100.0, copy_bytes_per_s=bytes_per_s),
        kv=SimpleNamespace(num_distinct=lambda blocks: [4], block_bytes=[100]),
    )
    for mode, expected in (("auto", is_cheaper), ("swap", True), ("recompute", False)):
        preemption = Preemption(None, memory, None, mode)  # type: ignore[arg-type]
        assert preemption.swapping_is_cheaper([member] * 3) is expected  # type: ignore[list-item]


def test_an_unforked_group_and_an_unfinished_pin_are_recomputed_not_swapped() -> None:
    bench = Bench(preemption_mode="swap", max_num_batched_tokens=4)
    bench.add("three", list(range(20)), n=3)
    bench.step()
    bench.begin_pin("pin", [*PREFIX, *range(20, 40)])
    bench.step()
    for name in ("three", "pin"):
        sequence = bench.scheduler.lifecycle.sequences[name]
        if sequence.row < 0:
            assert name == "pin"
            bench.core.control(Abort("three"))
            bench.step()
        assert sequence.row >= 0
        bench.scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
        event = bench.scheduler.lifecycle.events[-1]
        assert isinstance(event, Preempted) and not event.swapped and event.num_lost_tokens > 0
        assert sequence.host_blocks is None


@pytest.mark.parametrize(
    ("has_states", "has_drafts_in_flight", "may_be"),
    [(True, True, False), (True, False, True), (False, True, True)],
)
def test_a_state_is_not_swapped_while_its_drafts_are_unverified(
    has_states: bool, has_drafts_in_flight: bool, may_be: bool
) -> None:
    """Blocks of rejected drafts can be truncated, but a state cannot be rewound."""
    memory = SimpleNamespace(
        kv=SimpleNamespace(has_states=has_states),
        needs_to_stand=lambda blocks: [len(blocks)],
        fits_at_all=lambda needs: needs == [2],
        rates=None,
    )
    member, other = [SimpleNamespace(group=None, samples=True, blocks=None) for _ in range(2)]
    rows = SimpleNamespace(has_drafts_in_flight=lambda one: has_drafts_in_flight and one is member)
    preemption = Preemption(rows, memory, None, "swap")  # type: ignore[arg-type]
    assert preemption._may_be_swapped([other, member]) is may_be  # type: ignore[list-item]


def test_copies_on_write_of_one_plan_are_undone_from_the_last_to_the_first() -> None:
    """A row that copied a shared block, shared the copy and copied that again is swapped out from
    the first block, which has its tokens."""
    kv = KVManager((CacheGroup("full", (0,), 1, 1),), (8,), 4, host_limits=[8])
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, preemption_mode="swap")
    scheduler = Scheduler(Memory(kv, 16, watermark=0.0), config, 32, Fifo)
    add(scheduler, "a", 6)
    step(scheduler)
    sequence, pool, builder = scheduler.lifecycle.sequences["a"], kv.pools[0], PlanBuilder(99)
    [table] = sequence.blocks.tables
    first = table.blocks[-1]
    second, third = pool.allocate(), pool.allocate()  # others hold the first and second now
    builder.copies += [(0, sequence.row, first, second), (0, sequence.row, second, third)]
    table.blocks[-1] = third
    scheduler.preemption.preempt(sequence, "other", builder, 0.0)
    [out] = [move for move in builder.moves() if move.kind is MoveKind.SWAP_OUT]
    assert out.source.tolist()[-1] == first
    assert [pool.num_refs(block) for block in (first, second, third)] == [1, 1, 0]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_any_choice_of_the_preempted_row_gives_the_same_tokens(
    mode: str, place: int, monkeypatch
) -> None:
    """The other rows continue in the same plan."""
    rule = lambda self: self._rows.sequences()[place % self._rows.num_running]  # noqa: E731
    monkeypatch.setattr(Preemption, "_victim", rule)
    bench = Bench(num_blocks=13, preemption_mode=mode)
    requests = [bench.add(f"r{i}", [i, *PREFIX], 16) for i in range(4)]
    bench.finish()
    assert bench.num_preempted > 0
    for request in requests:
        assert bench.output[request.request_id][0] == expected_tokens(request, MAX_LEN)


def test_swapped_out_tables_end_after_the_computed_tokens() -> None:
    """This includes tokens written into a block that the row already had."""
    bench = Bench(preemption_mode="swap")
    bench.add("a", PREFIX[:9])
    for _ in range(3):
        bench.step()
    sequence = bench.sequence("a")
    assert sequence.num_computed_tokens == 11 and sequence.blocks.num_tokens < 11
    bench.scheduler.preemption.preempt(sequence, "other", PlanBuilder(99), 0.0)
    assert sequence.host_blocks is not None
    assert sequence.host_blocks.num_tokens == sequence.num_swapped_tokens == 11
