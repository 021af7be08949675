"""Failed steps with state layers: which rows are rewound, which are planned alone, which end."""

from typing import Any

import pytest

from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.spec.cache_group import CacheGroup
from tests.scheduler.test_left_plans import FULL, MAX_LEN, Driver
from tests.support.scheduler.fake_device import (
    Curse,
    CursedStep,
    FakeDevice,
    expected_tokens,
    make_request,
)

HYBRID = (*FULL, CacheGroup("state", (1,), state_size=8))
PROMPTS = {"a": 9, "b": 14, "c": 3}


class FailsAt(FakeDevice):
    """Fails once, in a step, after it was computed."""

    fails_at = -1

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        result = super().run(plan, masks)
        if plan.step_id == self.fails_at:
            for row, bound in zip(plan.rows.tolist(), plan.computed_bound.tolist(), strict=True):
                self.computed[row] = bound
            raise CursedStep("by chance")
        return result


class NoSwaps(FakeDevice):
    """Host memory to which all copies fail."""

    num_failed = 0

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        if any(move.kind == "swap_out" for move in plan.moves):
            self.num_failed += 1
            raise CursedStep("no host memory")
        return super().run(plan, masks)


def driver_of(device: type, groups: tuple[CacheGroup, ...], **settings: Any) -> Driver:
    made = type("Made", (Driver,), {"groups": groups, "make_device": device})
    driver: Driver = made(**{"num_blocks": 60, "is_lazy": True, **settings})
    return driver


def add_requests(driver: Driver, length: int = 20) -> None:
    for number, (name, num_tokens) in enumerate(PROMPTS.items()):
        prompt = list(range(number * 10, number * 10 + num_tokens))
        driver.core.add(make_request(name, prompt, max_tokens=length, seed=number))


def are_as_expected(driver: Driver, names: str = "abc", length: int = 20) -> bool:
    for number, (name, num_tokens) in enumerate(PROMPTS.items()):
        prompt = list(range(number * 10, number * 10 + num_tokens))
        request = make_request(name, prompt, max_tokens=length, seed=number)
        if name in names and driver.output[name, 0] != expected_tokens(request, MAX_LEN):
            return False
    return True


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_step_that_fails_by_chance_ends_no_request(depth: int, step: int) -> None:
    """Each of its rows is planned alone until it has caught up."""
    driver = driver_of(FailsAt, HYBRID, pipeline_depth=depth)
    driver.device.fails_at = step
    add_requests(driver)
    suspects, alone = driver.scheduler.lifecycle.suspects, set()
    for _ in range(200):
        was = set(suspects.until)
        plan = driver.core.plan()
        if plan is not None and was:
            assert len(plan.rows) == 1
            sequence = driver.scheduler.rows.table.sequences[plan.rows[0]]
            assert sequence in was
            alone.add(sequence.request.request_id)
        if driver.scheduler.planner.in_flight:
            driver.take()
        elif not driver.scheduler.has_work:
            break
    assert alone == set("abc") and not suspects.until
    assert are_as_expected(driver)


def test_only_the_request_that_makes_a_step_fail_ends() -> None:
    driver = driver_of(FakeDevice, HYBRID, pipeline_depth=2)
    driver.device.curses[1] = Curse(16, raises=True)
    add_requests(driver)
    driver.finish()
    assert driver.device.num_raised == 2, "once with the others, once alone"
    assert are_as_expected(driver, "ac")
    assert 1 <= len(driver.output["b", 0]) < 20


def test_a_row_that_fails_alone_resumes_from_its_last_state() -> None:
    """That is the state after its last computed full block."""
    driver = driver_of(FailsAt, HYBRID)
    driver.core.add(make_request("a", list(range(9)), max_tokens=30, seed=0))
    driver.device.fails_at = 20
    started: list[int] = []
    while driver.scheduler.has_work:
        plan = driver.core.plan()
        started += [] if plan is None else [start.num_computed_tokens for start in plan.started]
        driver.take()
    assert started == [0, 28]


@pytest.mark.parametrize("groups", [FULL, HYBRID])
def test_swaps_that_always_fail_end_no_request(groups: tuple[CacheGroup, ...]) -> None:
    """The sequences that could not be swapped out are recomputed."""
    settings = {"num_blocks": 16, "preemption_mode": "swap", "pipeline_depth": 2}
    driver = driver_of(NoSwaps, groups, **settings)
    add_requests(driver, 40)
    driver.finish()
    assert driver.device.num_failed > 0
    assert are_as_expected(driver, length=40)


def test_a_row_forked_from_a_rewound_row_is_rewound_too() -> None:
    """It is in a plan in flight after the plan that was to fork it."""
    settings = {"pipeline_depth": 3, "max_num_batched_tokens": 5, "max_num_seqs": 2}
    driver = driver_of(FailsAt, HYBRID[1:], **settings)
    driver.device.fails_at = 0
    request = make_request("a", list(range(10)), max_tokens=8, seed=0, n=2)
    driver.core.add(request)
    for _ in range(3):
        driver.core.plan()
    assert len(driver.scheduler.planner.in_flight[-1].plan.rows) == 2
    driver.take()
    driver.finish()
    assert driver.output["a", 0] == driver.output["a", 1] == expected_tokens(request, MAX_LEN)
