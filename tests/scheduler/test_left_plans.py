"""A plan's work besides its rows is done, even if the plan fails or loses all its rows. The core
never rests while it can plan something (`scheduler/core/planning.py`)."""

from typing import Any

import msgspec
import pytest

from quire.base.clock import FakeClock
from quire.base.masks import MaskPromise
from quire.base.messages import Append, Request
from quire.base.plan import Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.client.output import StepReader
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import PlanBuilder
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.engine.updates import read
from tests.support.scheduler.fake_device import (
    Curse,
    CursedStep,
    FakeDevice,
    FakeExecutor,
    expected_tokens,
    make_request,
)

FULL = (CacheGroup("full", (0,), 1, 8),)
MAX_LEN = 100


class Unlucky(FakeDevice):
    """Fails once in each plan that starts rows which compute nothing yet."""

    last = -1
    num_failed = 0

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        idle = {start.row for start in plan.started} - set(plan.rows.tolist())
        if idle and len(plan.rows) > 1 and plan.step_id != self.last:
            self.last = plan.step_id
            self.num_failed += 1
            raise CursedStep("by chance")
        return super().run(plan)


class Driver:
    """A core with a plain device, and the tokens that it has returned."""

    groups, make_device = FULL, Unlucky

    def __init__(self, num_blocks: int, is_lazy: bool = False, **settings: Any) -> None:
        pools = (num_blocks,) * len(self.groups)
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4} | settings
        kv = self.kv = KVManager(self.groups, pools, 4)
        self.device = self.make_device(self.groups, pools, 4)
        config = SchedulerConfig(**settings)
        memory = Memory(kv, config.max_num_batched_tokens or 0, watermark=0.0)
        self.scheduler = Scheduler(memory, config, MAX_LEN)
        self.clock = FakeClock()
        limits = RequestLimits(50, MAX_LEN, 0, 1 << 20)
        executor: Any = FakeExecutor(self.device, is_lazy)
        self.core = EngineCore(self.scheduler, executor, self.clock, limits)
        self.reader = StepReader()
        self.output: dict[tuple[str, int], list[int]] = {}

    def take(self) -> None:
        for update in read(self.reader, self.core.take()):
            name = update.request_id, update.index
            self.output.setdefault(name, []).extend(update.token_ids)

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                return
            self.core.plan()
            if self.scheduler.planner.in_flight:
                self.take()
        raise AssertionError("a request starves")


def is_open(request: Request) -> Request:
    return msgspec.structs.replace(request, is_open=True)


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_prompt_piece_in_a_plan_that_loses_its_rows_reaches_the_device(is_lazy: bool) -> None:
    driver = Driver(25, is_lazy, pipeline_depth=2, max_num_batched_tokens=1)
    core, scheduler = driver.core, driver.scheduler
    streamed = make_request("streamed", [1, 2, 3], max_tokens=3, temperature=0.0, seed=5)
    core.add(is_open(streamed))
    for _ in range(2):
        core.plan()
        driver.take()
    core.add(make_request("guilty", [9], max_tokens=30, temperature=0.0, seed=1, priority=-1))
    driver.device.curses[1] = Curse(6, raises=True)
    guilty = scheduler.lifecycle.sequences["guilty"]
    while True:
        core.plan()
        if guilty.num_computed_tokens == 7:
            break  # this plan is to raise
        driver.take()
    core.control(Append("streamed", [11, 12, 13], is_last=True))
    plan = core.plan()
    assert plan is not None and len(plan.host_tokens) == 1 and plan.rows.tolist() == [guilty.row]
    driver.finish()
    whole = msgspec.structs.replace(streamed, prompt_token_ids=[1, 2, 3, 11, 12, 13])
    assert driver.output["streamed", 0] == expected_tokens(whole, MAX_LEN)


GROUP = make_request("group", list(range(20, 26)), max_tokens=10, n=3, seed=2)


def swapped_out_group() -> Driver:
    """Return a driver with a swapped-out group that has more members than the budget tokens."""
    driver = Driver(18, max_num_batched_tokens=2, preemption_mode="swap")
    driver.core.add(GROUP)
    scheduler = driver.scheduler
    while scheduler.num_running != 3:
        driver.core.plan()
        driver.take()
    draft = PlanBuilder(0)
    scheduler.preemption.preempt(scheduler.rows.sequences()[0], "test", draft, 0.0)
    scheduler.planner._swaps = draft.swaps
    assert scheduler.num_running == 0 and draft.swaps
    return driver


def test_rows_that_start_in_a_step_that_fails_once_get_their_tokens() -> None:
    driver = swapped_out_group()
    driver.finish()
    assert driver.device.num_failed == 1
    for index in range(3):
        assert driver.output["group", index] == expected_tokens(GROUP, MAX_LEN)


def test_a_group_with_an_idle_row_fails_and_other_requests_continue() -> None:
    """Two of the three resumed members compute. They fail, and the third member with them."""
    driver = swapped_out_group()
    driver.device.curses[2] = Curse(5, raises=True)
    other = make_request("other", [1, 2, 3], max_tokens=4, temperature=0.0, seed=3)
    driver.core.add(other)
    driver.finish()
    assert driver.device.num_failed == 1
    assert driver.output["other", 0] == expected_tokens(other, MAX_LEN)
    assert all(pool.num_used == 0 for pool in (*driver.kv.pools, *driver.kv.host_pools))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_core_does_not_rest_while_something_can_be_planned(depth: int, mode: str) -> None:
    """The only request with work is preempted, and can resume at once."""
    driver = Driver(25, pipeline_depth=depth, preemption_mode=mode)
    core = driver.core
    core.add(is_open(make_request("open", list(range(40)), max_tokens=4, temperature=0.0)))
    prompt = list(range(49, 19, -1))
    core.add(make_request("busy", prompt, max_tokens=60, temperature=0.0, seed=1))
    while "busy" in driver.scheduler.lifecycle.sequences:
        rest_s = core.rest_s()
        assert rest_s is not None, "it waits for a message that may never arrive"
        driver.clock.advance(max(rest_s, 1e-3))
        core.advance()


def test_an_idle_open_prompt_of_a_higher_priority_does_not_block_others() -> None:
    """The other request was preempted so often that it needs room for the limits of all rows."""
    driver = Driver(40, max_num_batched_tokens=16)
    core, scheduler = driver.core, driver.scheduler
    core.add(is_open(make_request("silent", [1, 2, 3], max_tokens=4, temperature=0.0, priority=-1)))
    core.plan()
    driver.take()
    core.add(make_request("low", [7, 8, 9], max_tokens=30, temperature=0.0, seed=1))
    scheduler.lifecycle.sequences["low"].num_preemptions = 3
    for _ in range(40):
        core.plan()
        if scheduler.planner.in_flight:
            driver.take()
    assert list(scheduler.lifecycle.sequences) == ["silent"]
