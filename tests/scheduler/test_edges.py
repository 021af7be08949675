"""Small things that may be wrong by one: whom a failed row takes along, what must stay free, rows
of groups that never forked, and what is known of requests that lost their row.
"""

from types import SimpleNamespace

import pytest

from quire.base.config import SchedulerConfig
from quire.base.errors import RequestError
from quire.base.events import Preempted
from quire.base.messages import Abort, MeasuredRates
from quire.base.model_spec import CacheGroup
from quire.kv.manager import KVManager
from quire.scheduler import admission
from quire.scheduler.memory import Memory
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.preemption import Preemption
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.tainted import find_tainted
from tests.scheduler.device import make_request
from tests.scheduler.test_admission import add, others, scheduler_of
from tests.scheduler.test_failures import owner
from tests.scheduler.test_history import TEXT, ask, step
from tests.scheduler.test_history import add as add_text
from tests.scheduler.test_history import scheduler_of as with_history
from tests.scheduler.test_pins import ENDING, PREFIX, Bench, num_unpinned

FULL = CacheGroup("full", (0,), 1, 8)
ALSO_FULL = CacheGroup("also full", (1,), 1, 8)


def flight(rows: list[int], shared: list[tuple[int, list[list[int]], list[list[int]]]]) -> object:
    leases = [(row, 0) for row in rows]
    owners, plan = [owner(row) for row in rows], SimpleNamespace(moves=())
    return SimpleNamespace(leases=leases, row_sequences=owners, shared=shared, plan=plan)


def test_a_failed_row_that_stands_on_another_failed_one_is_a_dependant() -> None:
    """Row 1 holds a block that row 0 was to compute; row 2 one of row 1; row 3 none of theirs."""
    first = flight([0, 1, 3], [(0, [[]], [[5]]), (1, [[5]], [[6]]), (3, [[4]], [[7]])])
    second = flight([2], [(2, [[6]], [[8]])])
    found = find_tainted([first, second], {0: "bad", 1: "worse"}, 1)  # type: ignore[list-item,dict-item]
    assert found.failed == {(0, 0): (owner(0), "bad")}
    assert found.dependants == {(1, 0): owner(1), (2, 0): owner(2)}
    assert found.blocks == [{5, 6, 8}]
    assert (3, 0) not in found and (1, 0) in found


def test_after_three_preemptions_all_must_be_able_to_reach_their_limits() -> None:
    """a: 68 tokens, of which 8 are computed: 17 - 2 blocks. b: 65, and computed nothing yet: 17."""
    scheduler = scheduler_of(100, pipeline_depth=9)
    add(scheduler, "a", 8)
    scheduler.schedule(0.0)
    add(scheduler, "b", 5)
    waiting = scheduler.lifecycle.sequences["b"]
    reserve = scheduler.admission.reserve
    assert reserve(waiting) == 1
    waiting.num_preemptions = admission.MOST_PREEMPTIONS
    assert reserve(waiting) == 15 + 17 - 5 // 4
    waiting.num_preemptions -= 1
    assert reserve(waiting) == 1


@pytest.mark.parametrize("back", [False, True])
def test_a_group_that_lost_its_rows_before_it_forked_gives_them_back_once(back: bool) -> None:
    scheduler = scheduler_of(100, num_rows=6, pipeline_depth=1, long_prefill_token_threshold=4)
    prompt = list(range(2, 22))
    scheduler.add(make_request("three", prompt, max_tokens=5, n=3), 0.0)
    for _ in range(2):
        plan = scheduler.schedule(0.0).plan
        assert plan is not None
        scheduler.update(others(plan), 0.0)
    group = scheduler.lifecycle.sequences["three"].group
    assert (
        group is not None
        and scheduler.num_free_rows == 3
        and len(scheduler.lifecycle.unforked) == 1
    )
    scheduler.lifecycle.preempt(group.members[0], "test", 0.0)
    assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (6, 0)
    if back:
        assert scheduler.schedule(0.0).plan is not None
        assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (3, 1)
    scheduler.control(Abort("three"), 0.0)
    assert (scheduler.num_free_rows, len(scheduler.lifecycle.unforked)) == (6, 0)
    assert sorted(scheduler.rows.free) == list(range(6))
    scheduler.check_invariants()


def test_every_cache_group_must_have_room() -> None:
    kv = KVManager((FULL, ALSO_FULL), (40, 5), 4)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(Memory(kv, 64), config, 100)
    refusal = scheduler.add(make_request("large", list(range(20)), max_tokens=10), 0.0).refusal
    assert isinstance(refusal, RequestError)
    assert "more KV blocks than the pool has" in str(refusal)
    scheduler.add(make_request("small", list(range(16)), max_tokens=5), 0.0)


def test_who_must_see_its_whole_prompt_reads_no_cache() -> None:
    """It lacks all of its tokens then, though they are there."""
    scheduler = with_history()
    ask(scheduler, "a", TEXT[:22])
    add_text(scheduler, "all", TEXT[:22], 0.0, prompt_logprobs=1)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["all"]) == 22
    add_text(scheduler, "hit", TEXT[:22], 0.0)
    assert scheduler.progress.remaining(scheduler.lifecycle.sequences["hit"]) == 2
    unread, hit = step(scheduler, 0.0)
    assert (unread.device, unread.miss) == (0, "unread")
    assert hit.device == 20


def test_what_a_request_had_computed_is_known_also_if_it_ended_without_a_row() -> None:
    scheduler = with_history(num_blocks=12)
    add_text(scheduler, "a", TEXT[:30], 1.0, max_tokens=9)
    step(scheduler, 1.0)
    scheduler.lifecycle.preempt(scheduler.lifecycle.sequences["a"], "test", 1.0)
    scheduler.control(Abort("a"), 1.0)
    ask(scheduler, "b", list(range(40)), now=5.0)
    report = ask(scheduler, "c", TEXT[:30], now=7.5)
    assert (report.miss, report.near_id, report.lost_s) == ("evicted", "a", 2.5)


def test_a_pinned_prefix_counts_in_what_a_waiting_request_lacks() -> None:
    bench = Bench()
    bench.pin()
    bench.add("more", PREFIX + ENDING)
    waiting = bench.sequence("more")
    assert bench.scheduler.progress.remaining(waiting) == len(ENDING)
    bench.core.control(Abort("more"))
    bench.finish()


def test_a_prefix_that_is_given_up_before_it_was_computed_takes_no_room() -> None:
    bench = Bench(max_num_batched_tokens=4)
    assert num_unpinned(bench) == 24
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert num_unpinned(bench) == 24 - 3
    bench.core.control(Abort("pin"))
    bench.finish()
    assert num_unpinned(bench) == 24


@pytest.mark.parametrize(
    ("bytes_per_s", "is_cheaper"), [(1500, False), (1600, False), (1601, True)]
)
def test_swapping_against_computing_again(bytes_per_s: float, is_cheaper: bool) -> None:
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


def test_what_a_step_copied_out_is_there_with_its_result() -> None:
    kv = KVManager((FULL,), (4,), 4, host_limits=[4])
    tier = kv.tier
    assert tier is not None
    for step_id, name in ((3, b"x"), (5, b"y")):
        tier._fresh = [(0, name)]
        tier.end_plan(step_id)
    settled = [tier.settle(step_id) for step_id in range(2, 7)]
    assert settled == [[], [(0, b"x")], [], [(0, b"y")], []]


def test_what_is_not_worth_swapping_is_computed_again() -> None:
    """A group before it forks, and a prefix that is to be pinned."""
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


def test_what_a_scored_prompt_may_take_from_the_cache() -> None:
    """What was scored; all that is known, once every position but the first is."""
    scheduler = with_history()
    add_text(scheduler, "r", TEXT[:10], 0.0, prompt_logprobs=1)
    sequence = scheduler.lifecycle.sequences["r"]
    assert sequence.num_readable_tokens == 0
    sequence.num_preemptions = 1
    found = []
    for sequence.num_prompt_logprobs in (0, 5, 8, 9, 10):
        found.append(sequence.num_readable_tokens)
    assert found == [0, 5, 8, 10, 10]
