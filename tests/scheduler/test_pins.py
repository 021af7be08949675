"""Pinned prefixes: shared, copied and unwritten blocks by number; room, time, salts, failures."""

import msgspec
import numpy as np
import pytest

from quire.base.errors import EngineBusy, RequestError
from quire.base.messages import GrammarReady, ResetPrefixCache, Unpin
from quire.base.plan import Move, Plan
from quire.scheduler.core.plans import PlanBuilder
from quire.spec.cache_group import CacheGroup
from tests.support.cases import in_turn
from tests.support.scheduler.fake_device import (
    Curse,
    make_request,
)
from tests.support.scheduler.pinning_core import BLOCK, ENDING, FULL, PREFIX, WINDOW, Bench


def copies(plan: Plan) -> list[tuple[int, int, int]]:
    """(group, from, to) of the blocks that a plan copies."""
    moves: list[Move] = [move for move in plan.moves if move.kind == "copy"]
    return [
        (move.group, *pair)
        for move in moves
        for pair in zip(move.source.tolist(), move.destination.tolist(), strict=True)
    ]


# ---- sharing and copying -----------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_blocks_and_copies_the_last(caching: bool) -> None:
    bench = Bench(caching=caching)
    pin = bench.pin()
    blocks, before = bench.held(pin), bench.written(pin)
    assert len(blocks) == 3 and bench.num_used == [3]
    assert all((plan.sample_rows.size, plan.num_candidates.size) == (0, 0) for plan in bench.plans)
    request = bench.add("fork", PREFIX + ENDING)
    bench.step()
    plan, mine = bench.plans[-1], bench.sequence("fork").blocks.tables[0].blocks
    assert plan.started[0].num_computed_tokens == 11
    assert plan.num_tokens.tolist() == [5]
    assert mine[:2] == blocks[:2] and mine[2] not in blocks
    assert copies(plan) == [(0, blocks[2], mine[2])]
    assert bench.sequence("fork").num_cached_tokens == 11
    bench.finish()
    bench.assert_right(request)
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    assert [bench.kv.pools[0].num_refs(block) for block in blocks] == [1, 1, 1]
    assert bench.num_used == [3] and pin.num_hits == 1
    assert bench.scheduler.pinned.num_hits == 1 and bench.scheduler.pinned.num_hit_tokens == 11


@pytest.mark.parametrize(("length", "computed"), [(11, 10), (8, 7), (9, 8), (1, 0)])
def test_a_prompt_equal_to_the_prefix_computes_its_last_token_again(
    length: int, computed: int
) -> None:
    bench = Bench(caching=False)
    pin = bench.pin("pin", PREFIX[:length])
    blocks, before = bench.held(pin), bench.written(pin)
    request = bench.add("same", PREFIX[:length])
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == computed
    mine = bench.sequence("same").blocks.tables[0].blocks
    assert mine[: computed // BLOCK] == blocks[: computed // BLOCK]
    assert mine[computed // BLOCK] not in blocks
    bench.finish()
    bench.assert_right(request)
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))


@pytest.mark.parametrize(("caching", "computed"), [(True, 8), (False, 0)])
def test_a_shorter_prompt_finds_full_blocks_in_the_index(caching: bool, computed: int) -> None:
    bench = Bench(caching=caching)
    pin = bench.pin()
    request = bench.add("short", PREFIX[:9] + [49])
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == computed
    assert copies(bench.plans[-1]) == []
    bench.finish()
    bench.assert_right(request)
    assert pin.num_hits == 0


def test_the_longest_pin_is_used_unless_an_index_hit_is_longer() -> None:
    bench = Bench(num_blocks=40)
    short, longer = bench.pin("short", PREFIX[:6]), bench.pin("longer", PREFIX)
    for name, prompt, computed in [
        ("a", PREFIX + ENDING, 11),
        ("b", PREFIX[:9] + [49, 48], 8),  # of the index: more than the 6 of the short one
        ("c", PREFIX[:7] + [49], 6),
        ("d", PREFIX + ENDING + [1], 16),  # blocks that a computed
    ]:
        bench.add(name, prompt)
        bench.step()
        assert bench.plans[-1].started[0].num_computed_tokens == computed, name
        bench.finish()
    assert longer.num_hits == 2
    assert short.num_hits == 3  # b, c, and the longer one


@pytest.mark.parametrize("groups", [(WINDOW,), (FULL, WINDOW)])
@pytest.mark.parametrize("budget", [64, 5])
def test_a_fork_of_a_pinned_window_copies_the_last_block_of_each_group(
    groups: tuple[CacheGroup, ...], budget: int
) -> None:
    """A pin keeps only the blocks that the window still sees."""
    bench = Bench(groups=groups, max_num_batched_tokens=budget)
    prefix = list(range(19))  # the next token sees 14..19: blocks 3 and 4
    pin = bench.pin("pin", prefix)
    before, last = bench.written(pin), [bench.held(pin, g)[4] for g in range(len(groups))]
    request = bench.add("fork", prefix + ENDING, max_tokens=20)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 19
    assert [(group, source) for group, source, _ in copies(bench.plans[-1])] == list(
        enumerate(last)
    )
    bench.finish()
    bench.assert_right(request)
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    bench.core.control(Unpin("pin"))
    assert bench.num_used == [0] * len(groups)


@pytest.mark.parametrize("caching", [True, False])
def test_sequences_of_one_request_share_the_pinned_prefix(caching: bool) -> None:
    bench = Bench(caching=caching)
    pin = bench.pin()
    blocks, before = bench.held(pin), bench.written(pin)
    request = bench.add("three", [*PREFIX, 40], max_tokens=9, n=3)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [1]
    assert [source for _, source, _ in copies(bench.plans[-1])] == [blocks[2]]
    bench.finish()
    bench.assert_right(request)
    assert len(bench.output["three"]) == 3
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    assert pin.num_hits == 1


@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_request_forks_its_pin_again_if_it_is_recomputed(swaps: bool) -> None:
    """The second fork does not count as another hit."""
    bench = Bench(caching=False, preemption_mode="swap" if swaps else "recompute")
    pin = bench.pin()
    blocks, before = bench.held(pin), bench.written(pin)
    request = bench.add("fork", PREFIX + ENDING, max_tokens=12)
    for _ in range(4):
        bench.step()
    draft = PlanBuilder(0)
    bench.scheduler.preemption.preempt(bench.sequence("fork"), "test", draft, 0.0)
    bench.scheduler.planner._swaps = draft.swaps
    assert bench.num_used == [3]
    bench.step()
    back = bench.sequence("fork").blocks.tables[0].blocks
    if swaps:
        assert not set(back) & set(blocks)
    else:
        assert bench.plans[-1].started[0].num_computed_tokens == 11
        assert back[:2] == blocks[:2]
    bench.finish()
    bench.assert_right(request)
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    assert pin.num_hits == 1


def test_a_pin_does_not_recompute_blocks_that_are_in_the_index() -> None:
    bench = Bench()
    bench.add("first", PREFIX + ENDING)
    bench.finish()
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 8
    bench.finish()
    assert bench.pins["pin"].blocks is not None


# ---- other requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(("pinned", "mode"), in_turn([True, False], ["recompute", "swap"]))
def test_requests_that_fill_the_pool_many_times_do_not_evict_a_pin(pinned: bool, mode: str) -> None:
    """Without the pin, the same prefix is evicted."""
    bench = Bench(num_blocks=28, preemption_mode=mode)
    before = [np.empty(0)]
    if pinned:
        before = bench.written(bench.pin())
    else:
        bench.add("first", [*PREFIX, 40], max_tokens=1)
        bench.finish()
    rng = np.random.default_rng(0)
    requests = [
        bench.add(f"r{i}", rng.integers(11, 50, rng.integers(8, 40)).tolist(), max_tokens=20)
        for i in range(60)
    ]
    bench.finish()
    bench.assert_right(*requests)
    writes = sum(len(plan.block_writes.block_id) for plan in bench.plans)
    assert writes > 10 * 28 and bench.num_preempted > 0
    if pinned:
        pin = bench.pins["pin"]
        assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    bench.add("late", PREFIX + ENDING)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == (11 if pinned else 0)


def test_resetting_the_prefix_index_keeps_pins() -> None:
    bench = Bench()
    pin = bench.pin()
    bench.kv.reset_prefix_cache()
    request = bench.add("fork", PREFIX + ENDING)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 11
    bench.finish()
    bench.assert_right(request)
    assert pin.num_hits == 1


def test_a_pin_that_was_held_back_is_not_held_back_again() -> None:
    """It arrived during a pause, and is computed again after a reset of the cache."""
    bench = Bench()
    request = make_request("pin", PREFIX, max_tokens=1, temperature=0.0)
    bench._send(msgspec.structs.replace(request, pin_s=0.0, is_held_back=True))
    bench.core.control(GrammarReady("pin"))
    bench.finish()
    bench.core.control(ResetPrefixCache("new"))
    for _ in range(4):
        bench.step()
    assert bench.pins["pin"].sequence is None


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("field", ["salt", "adapter_id"])
def test_a_pin_is_shared_only_by_requests_with_its_salt_and_adapter(
    field: str, caching: bool
) -> None:
    bench = Bench(caching=caching, num_blocks=40)
    salt, adapter = ("mine", "") if field == "salt" else ("", "mine")
    request = make_request("pin", PREFIX, max_tokens=1, temperature=0.0, salt=salt)
    bench._send(msgspec.structs.replace(request, pin_s=0.0, adapter_id=adapter))
    bench.finish()
    for name, value, computed in [("a", "", 0), ("b", "other", 0), ("c", "mine", 11)]:
        bench.add(name, PREFIX + ENDING, **{field: value})
        bench.step()
        assert bench.plans[-1].started[0].num_computed_tokens == computed, value
        bench.finish()
    assert bench.pins["pin"].num_hits == 1


# ---- time --------------------------------------------------------------------------------------


def test_a_pin_expires_on_time_even_in_an_idle_engine() -> None:
    """Its time starts once the prefix is computed."""
    bench = Bench(max_num_batched_tokens=4)
    bench.begin_pin("pin", PREFIX, pin_s=5.0)
    bench.begin_pin("stays", ENDING)
    for _ in range(2):
        bench.step()
        bench.clock.advance(10.0)
    bench.finish()
    found, _ = bench.core.prefixes()
    assert (found.age_s, found.expires_in_s, found.is_ready) == (20.0, 5.0, True)
    assert bench.core.rest_s() == 5.0
    bench.clock.advance(4.75)
    bench.core.advance()
    assert bench.core.rest_s() == 0.25
    assert bench.num_used == [5] and list(bench.pins) == ["pin", "stays"]
    bench.clock.advance(0.25)
    assert bench.core.rest_s() == 0.0
    bench.core.advance()
    assert bench.num_used == [2] and list(bench.pins) == ["stays"]
    assert bench.core.rest_s() is None


def test_a_request_keeps_running_after_its_pinned_prefix_expires() -> None:
    bench = Bench(caching=False)
    bench.pin(pin_s=5.0)
    request = bench.add("fork", PREFIX + ENDING, max_tokens=20)
    bench.step()
    bench.clock.advance(5.0)
    bench.step()
    assert not bench.pins
    late = bench.add("late", PREFIX + ENDING)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 0
    bench.finish()
    bench.assert_right(request, late)
    assert bench.num_used == [0]


# ---- room --------------------------------------------------------------------------------------


def test_at_most_half_of_the_pool_may_be_pinned() -> None:
    bench = Bench(num_blocks=20)
    with pytest.raises(RequestError, match=r"11 of 20 KV blocks, and the limit is half of them"):
        bench.pin("large", list(range(41)))
    bench.pin("a", list(range(29)))  # 8 blocks
    with pytest.raises(RequestError, match=r"would raise the pinned blocks to 11 of 20"):
        bench.pin("b", list(range(12)))
    bench.pin("c", list(range(30, 38)))
    with pytest.raises(RequestError, match="half of them"):
        bench.pin("d", [49])
    bench.core.control(Unpin("c"))
    bench.pin("d", [49])
    assert list(bench.pins) == ["a", "d"]


def test_a_pin_is_refused_while_a_running_request_needs_the_room() -> None:
    bench = Bench(num_blocks=20)
    request = bench.add("big", ENDING, max_tokens=68)  # 72 tokens are computed: 18 blocks
    bench.step()
    with pytest.raises(EngineBusy, match="of 11 tokens cannot be pinned now"):
        bench.begin_pin("pin", PREFIX)
    bench.begin_pin("small", PREFIX[:8])
    bench.finish()
    bench.assert_right(request)
    bench.pin()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_request_that_fits_only_with_shared_blocks_is_served(mode: str) -> None:
    """It needs 19 of 20 blocks, and shares 10 of them. Other requests run alongside."""
    bench = Bench(num_blocks=20, preemption_mode=mode)
    prefix = [i % 50 for i in range(40)]
    before = bench.written(bench.pin("pin", prefix))
    with pytest.raises(RequestError, match="without pinned prefixes"):
        bench.add("stranger", [49, *prefix[1:]], max_tokens=36)
    others = [bench.add(f"early {i}", [20 + i] * 9, max_tokens=15) for i in range(3)]
    request = bench.add("sharing", prefix, max_tokens=36)
    others += [bench.add(f"other {i}", [30 + i] * 9, max_tokens=15) for i in range(3)]
    bench.finish()
    bench.assert_right(request, *others)
    assert bench.num_preempted > 0
    pin = bench.pins["pin"]
    assert all(np.array_equal(*pair) for pair in zip(before, bench.written(pin), strict=True))
    bench.core.control(Unpin("pin"))
    stranger = bench.add("stranger", [49, *prefix[1:]], max_tokens=36)
    bench.finish()
    bench.assert_right(stranger)


def test_a_fork_waits_for_a_free_block_for_its_copy() -> None:
    """The pool is full, and the fork needs no other block."""
    bench = Bench(num_blocks=8)
    bench.pin()
    other = bench.add("other", list(range(20, 37)), max_tokens=3)
    bench.step()
    assert bench.num_used == [8]
    request = bench.add("fork", [*PREFIX, 40], max_tokens=1)
    bench.step()
    assert bench.scheduler.num_waiting == 1
    bench.finish()
    bench.assert_right(other, request)
    assert copies(bench.plans[-1]) and bench.num_preempted == 0


# ---- ends --------------------------------------------------------------------------------------


def test_unpinning_a_prefix_that_is_being_computed_aborts_its_request() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert bench.num_used == [1] and not bench.core.prefixes()[0].is_ready
    bench.core.control(Unpin("pin"))
    assert not bench.pins and bench.num_used == [0]
    bench.finish()
    assert bench.reason["pin"] == "abort"


def test_requests_keep_running_on_a_prefix_that_is_unpinned() -> None:
    bench = Bench(caching=False)
    pin = bench.pin()
    blocks = bench.held(pin)
    requests = [bench.add(f"r{i}", [*PREFIX, 40 + i], max_tokens=15) for i in range(3)]
    bench.step()
    bench.core.control(Unpin("pin", tenant="somebody else"))
    assert bench.pins
    bench.core.control(Unpin("pin"))
    refs = [bench.kv.pools[0].num_refs(block) for block in blocks]
    assert refs == [3, 3, 0] and not bench.pins
    filler = bench.add("filler", list(range(49, 19, -1)), max_tokens=20)
    bench.finish()
    bench.assert_right(filler, *requests)
    assert bench.num_used == [0]


@pytest.mark.parametrize("position", [0, 5, 10])
def test_a_pin_is_dropped_if_a_step_fails_while_it_is_computed(position: int) -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.device.curses[7] = Curse(position, raises=True)
    other = bench.add("other", ENDING, seed=1)
    bench.begin_pin("pin", PREFIX, seed=7)
    waiting = bench.add("waiting", PREFIX + ENDING, seed=2)
    bench.finish()
    assert bench.reason["pin"] == "error" and not bench.pins
    bench.assert_right(other, waiting)
    assert bench.num_used == [0]
    bench.device.curses.clear()
    bench.pin("pin")


@pytest.mark.parametrize("raises", [True, False])
def test_a_failed_request_causes_its_pinned_prefix_to_be_recomputed(raises: bool) -> None:
    """No client is notified, and the pin keeps its place in the list."""
    bench = Bench(num_blocks=40, caching=False)
    pin = bench.pin()
    ready = bench.add("good", [*PREFIX, 40], max_tokens=20, seed=1)
    bench.step()
    bench.device.curses[9] = Curse(13, raises)
    bench.add("bad", PREFIX + ENDING, seed=9)
    bench.reason.clear()
    while "bad" not in bench.reason:
        bench.step()
    assert bench.reason == {"bad": "error"}
    assert pin.blocks is None and not bench.core.prefixes()[0].is_ready
    num_plans = len(bench.plans)
    bench.finish()
    assert bench.pins["pin"] is pin and pin.blocks is not None
    restarts = [start for plan in bench.plans[num_plans:] for start in plan.started]
    assert [(len(start.token_ids), start.num_computed_tokens) for start in restarts] == [(11, 0)]
    late = bench.add("late", PREFIX + ENDING, seed=3)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 11
    bench.finish()
    bench.assert_right(ready, late)
    assert bench.num_used == [3]


# ---- ids ---------------------------------------------------------------------------------------


def test_two_pins_of_the_same_tokens_share_full_blocks() -> None:
    bench = Bench()
    one, two = bench.pin("one"), bench.pin("two")
    assert bench.held(one)[:2] == bench.held(two)[:2]  # of the index
    assert bench.num_used == [4] and bench.scheduler.pinned.num_blocks == 4
    bench.core.control(Unpin("one"))
    assert bench.num_used == [3]
    request = bench.add("fork", PREFIX + ENDING)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 11
    bench.finish()
    bench.assert_right(request)
    assert two.num_hits == 1
    bench.core.control(Unpin("two"))
    assert bench.num_used == [0]


def test_a_request_id_is_in_use_as_long_as_its_pin() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.begin_pin("pin", PREFIX)
    for _ in range(2):  # while it is computed, and after
        with pytest.raises(RequestError, match="request id 'pin' is in use"):
            bench.add("pin", ENDING)
        with pytest.raises(RequestError, match="request id 'pin' is in use"):
            bench.begin_pin("pin", ENDING)
        bench.finish()
    bench.core.control(Unpin("pin"))
    bench.pin("pin", ENDING)


@pytest.mark.parametrize("pin_s", [-1.0, float("nan"), float("inf")])
def test_an_invalid_ttl_is_refused(pin_s: float) -> None:
    with pytest.raises(RequestError, match="ttl_s must be a number of seconds"):
        Bench().begin_pin("pin", PREFIX, pin_s=pin_s)


def test_a_pin_dropped_before_its_first_plan_is_reported_with_the_next_result() -> None:
    bench = Bench()
    bench.begin_pin("pin", PREFIX)
    bench.core.control(Unpin("pin"))
    assert bench.core.plan() is None and bench.core.has_work  # its end is not reported yet
    bench.add("next", PREFIX)
    bench.step()
    assert bench.reason == {"pin": "abort"}
