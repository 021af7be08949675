"""Pinned prefixes: shared, copied and unwritten blocks by number; room, time, salts, failures."""

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.cache_group import CacheGroup
from quire.base.clock import FakeClock
from quire.base.config import SchedulerConfig
from quire.base.errors import EngineBusy, RequestError
from quire.base.events import Preempted
from quire.base.messages import Request, Unpin
from quire.base.plan import Move, Plan
from quire.base.step_outputs import StepReader
from quire.base.validation import RequestLimits
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.reuse.pinned import Pin
from quire.scheduler.scheduler import Scheduler
from tests.support.engine.updates import read
from tests.support.scheduler.fake_device import (
    Curse,
    FakeDevice,
    FakeExecutor,
    expected_tokens,
    make_request,
)

FULL = CacheGroup("full", (0,), 1, 8)
WINDOW = CacheGroup("window", (1,), 1, 8, window=6)
MAX_LEN = 100
BLOCK = 4
PREFIX = list(range(11))  # two full blocks and 3 tokens
ENDING = [41, 42, 43, 44, 45]


def num_unpinned(bench: "Bench") -> int:
    """Blocks that no pin holds, or will hold."""
    return bench.kv.pools[0].num_blocks - bench.scheduler.pinned.reserved[0]


class Bench:
    """A core over a plain device: its plans, and what its requests have got."""

    def __init__(
        self,
        num_blocks: int = 24,
        groups: tuple[CacheGroup, ...] = (FULL,),
        caching: bool = True,
        num_host_blocks: int = 0,
        **settings: Any,
    ) -> None:
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "pipeline_depth": 1} | settings
        pools = (num_blocks,) * len(groups)
        host = (num_host_blocks,) * len(groups) if num_host_blocks else None
        self.kv = KVManager(groups, pools, BLOCK, caching, host_limits=host)
        self.device = FakeDevice(groups, pools, BLOCK)
        config = SchedulerConfig(**settings)
        memory = Memory(self.kv, config.max_num_batched_tokens or 0, watermark=0.0)
        self.scheduler = Scheduler(memory, config, MAX_LEN)
        self.clock = FakeClock()
        limits = RequestLimits(50, MAX_LEN, 0, 1 << 20)
        executor: Any = FakeExecutor(self.device, is_lazy=False)
        self.core = EngineCore(self.scheduler, executor, self.clock, limits)
        self.plans: list[Plan] = []
        self.output: dict[str, dict[int, list[int]]] = {}
        self.reason: dict[str, str] = {}
        self.reader = StepReader()
        self.num_preempted = 0
        self.core.subscribe(self._hear)

    def _hear(self, event: object) -> None:
        self.num_preempted += isinstance(event, Preempted)

    def add(self, name: str, prompt: list[int], max_tokens: int = 6, **more: Any) -> Request:
        adapter_id = more.pop("adapter_id", "")
        request = make_request(name, prompt, max_tokens=max_tokens, **more)
        request = msgspec.structs.replace(request, adapter_id=adapter_id)
        self._send(request)
        return request

    def begin_pin(
        self, name: str, prompt: list[int], pin_s: float = 0.0, pin_share: float = 1.0, **more: Any
    ) -> None:
        request = make_request(name, prompt, max_tokens=1, temperature=0.0, **more)
        self._send(msgspec.structs.replace(request, pin_s=pin_s, pin_share=pin_share))

    def _send(self, request: Request) -> None:
        self.core.add(request)
        num = request.params.num_samples
        self.output[request.request_id] = {index: [] for index in range(num)}

    def pin(self, name: str = "pin", prompt: list[int] = PREFIX, **more: Any) -> Pin:
        """One that is computed."""
        self.begin_pin(name, prompt, **more)
        self.finish()
        assert self.reason[name] == "pinned" and self.output[name] == {0: []}
        return self.pins[name]

    def step(self) -> None:
        """One plan, which is added to `plans`, and its result."""
        plan = self.core.plan()
        if plan is not None:
            self.plans.append(plan)
        outputs = self.core.take() if self.core.num_in_flight else self.core.take_dropped()
        for update in read(self.reader, outputs):
            self.output[update.request_id][update.index] += update.token_ids
        for update, finish in outputs.finished:
            self.reason[update.request_id] = finish.reason
        self.core.publish()
        self.scheduler.check_invariants()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("a request starves")

    def assert_right(self, *requests: Request) -> None:
        for request in requests:
            wanted = expected_tokens(request, MAX_LEN)
            assert all(got == wanted for got in self.output[request.request_id].values())
            assert self.reason[request.request_id] == "length"

    @property
    def pins(self) -> dict[str, Pin]:
        return self.scheduler.pinned.by_id

    def held(self, pin: Pin, group: int = 0) -> list[int]:
        assert pin.blocks is not None, "it is not computed"
        return list(pin.blocks.tables[group].blocks)

    def written(self, pin: Pin) -> list[np.ndarray]:
        """What is in the blocks of a pin, by group."""
        assert pin.blocks is not None, "it is not computed"
        return [
            slots.reshape(-1, BLOCK)[table.live_blocks].copy()
            for slots, table in zip(self.device.slots, pin.blocks.tables, strict=True)
        ]

    def sequence(self, name: str) -> Sequence:
        return self.scheduler.lifecycle.sequences[name]

    @property
    def num_used(self) -> list[int]:
        return [pool.num_used for pool in self.kv.pools]


def copies(plan: Plan) -> list[tuple[int, int, int]]:
    """(group, from, to) of the blocks that a plan copies."""
    moves: list[Move] = [move for move in plan.moves if move.kind == "copy"]
    return [
        (move.group, *pair)
        for move in moves
        for pair in zip(move.source.tolist(), move.destination.tolist(), strict=True)
    ]


# ---- who shares, who copies --------------------------------------------------------------------


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
def test_of_a_prompt_equal_to_the_prefix_one_token_is_computed_again(
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


def test_the_longest_prefix_counts_and_a_longer_index_hit_goes_before_it() -> None:
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
def test_a_window_group(groups: tuple[CacheGroup, ...], budget: int) -> None:
    """Only what the window still sees is kept, and copied as elsewhere."""
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
def test_samples_of_one_request_share_it_too(caching: bool) -> None:
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
def test_a_request_preempted_and_back(swaps: bool) -> None:
    """Recomputed, it forks the prefix again, which is one hit in all."""
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


def test_a_prefix_that_is_in_the_index_is_not_computed_again() -> None:
    bench = Bench()
    bench.add("first", PREFIX + ENDING)
    bench.finish()
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 8
    bench.finish()
    assert bench.pins["pin"].blocks is not None


# ---- what others cannot do to it ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("pinned", [True, False])
def test_others_that_fill_the_pool_many_times_do_not_evict_it(pinned: bool, mode: str) -> None:
    """Without the pin, the same prefix is long gone."""
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


def test_forgetting_the_index_leaves_pins_alone() -> None:
    bench = Bench()
    pin = bench.pin()
    bench.kv.reset_prefix_cache()
    request = bench.add("fork", PREFIX + ENDING)
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == 11
    bench.finish()
    bench.assert_right(request)
    assert pin.num_hits == 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("field", ["salt", "adapter_id"])
def test_salts_and_adapters_keep_requests_apart(field: str, caching: bool) -> None:
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


def test_a_prefix_goes_at_its_time_also_if_nothing_else_happens() -> None:
    """Its time begins when it is there."""
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


def test_a_request_goes_on_when_the_time_of_its_prefix_is_over() -> None:
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


def test_half_of_the_pool_may_be_pinned() -> None:
    bench = Bench(num_blocks=20)
    with pytest.raises(RequestError, match=r"11 of 20 KV blocks, and half of them may be"):
        bench.pin("large", list(range(41)))
    bench.pin("a", list(range(29)))  # 8 blocks
    with pytest.raises(RequestError, match=r"of 12 tokens would bring what is pinned to 11 of 20"):
        bench.pin("b", list(range(12)))
    bench.pin("c", list(range(30, 38)))
    with pytest.raises(RequestError, match="half of them"):
        bench.pin("d", [49])
    bench.core.control(Unpin("c"))
    bench.pin("d", [49])
    assert list(bench.pins) == ["a", "d"]


def test_a_prefix_is_refused_while_an_open_request_needs_the_room() -> None:
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
def test_a_request_that_fits_only_because_it_shares(mode: str) -> None:
    """19 blocks of 20, of which 10 are the prefix's; others come and go beside it."""
    bench = Bench(num_blocks=20, preemption_mode=mode)
    prefix = [i % 50 for i in range(40)]
    before = bench.written(bench.pin("pin", prefix))
    with pytest.raises(RequestError, match="beside what is pinned"):
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


def test_the_copy_of_the_last_block_needs_a_block() -> None:
    """A fork that needs no other one waits until the pool, full to the last block, has it."""
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


def test_unpinning_while_it_is_computed_ends_it_and_tells_who_waits() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.begin_pin("pin", PREFIX)
    bench.step()
    assert bench.num_used == [1] and not bench.core.prefixes()[0].is_ready
    bench.core.control(Unpin("pin"))
    assert not bench.pins and bench.num_used == [0]
    bench.finish()
    assert bench.reason["pin"] == "abort"


def test_unpinning_while_requests_run_on_it() -> None:
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
def test_a_step_that_fails_while_it_is_computed(position: int) -> None:
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
def test_a_request_that_failed_makes_its_prefix_be_computed_again(raises: bool) -> None:
    """And those who share it; nobody is told, and its place in the list stays."""
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


# ---- names -------------------------------------------------------------------------------------


def test_two_pins_of_the_same_tokens() -> None:
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


def test_an_id_is_in_use_for_as_long_as_its_prefix() -> None:
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
def test_times_that_are_none(pin_s: float) -> None:
    with pytest.raises(RequestError, match="ttl_s must be a number of seconds"):
        Bench().begin_pin("pin", PREFIX, pin_s=pin_s)


def test_who_is_dropped_before_a_plan_is_told_with_its_result() -> None:
    bench = Bench()
    bench.begin_pin("pin", PREFIX)
    bench.core.control(Unpin("pin"))
    assert bench.core.plan() is None and bench.core.has_work  # there is something to tell
    bench.add("next", PREFIX)
    bench.step()
    assert bench.reason == {"pin": "abort"}
