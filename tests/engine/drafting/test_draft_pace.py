"""The number of draft tokens that pays off."""

import random
import time
from itertools import product

import numpy as np
import pytest

from quire.engine.drafting.draft_pace import (
    FIRST_CHANCE,
    FORGOTTEN,
    FREE_TOKENS,
    MIN_CHANCE,
    MIN_GAIN,
    Chance,
    StepTimes,
    lengths,
    max_likely,
)


def times_of(**seconds: float) -> StepTimes:
    """`t4=1.0`: a step of 4 tokens takes a second."""
    times = StepTimes()
    for name, each in seconds.items():
        times.observe(int(name[1:]), each)
    return times


def test_times_between_two_sizes_are_interpolated() -> None:
    times = times_of(t1=1.0, t4=4.0)
    assert times.seconds(3) == pytest.approx(3.0)
    assert times.seconds(4) == 4.0
    assert times.seconds(FREE_TOKENS) == 4.0, "untried sizes seem free, so that they are tried"
    assert StepTimes().seconds(1) is None


def test_times_of_much_larger_sizes_are_extrapolated() -> None:
    """Otherwise one trial could take as long as many steps."""
    times = times_of(t1=1.0, t64=4.0)
    assert times.seconds(128) == 4.0
    assert times.seconds(512) == pytest.approx(16.0)
    nums = np.array([1, 64, 100, 512])
    assert times.seconds_of(nums) == pytest.approx([times.seconds(num) for num in nums])
    assert sum(lengths([24] * 64, [0.5] * 64, 0, times)) <= 64


def test_verify_times_of_unseen_sizes_follow_plain_steps() -> None:
    """Drafts were verified with one row, and there are 64 now, on a device with cheap tokens."""
    plain, verified = times_of(t1=1.0, t64=1.0), times_of(t6=1.1)
    found = verified.verify_seconds(plain, np.array([2, 6, 64, 128, 256]))
    assert found == pytest.approx([1.02, 1.1, 1.0, 1.0, 2.0])
    assert sum(lengths([4] * 64, [0.7] * 64, 0, plain, verified=verified)) == 64


def test_times_follow_the_measurements() -> None:
    times = times_of(t2=1.0)
    for _ in range(60):
        times.observe(2, 3.0)
    assert times.seconds(2) == pytest.approx(3.0, rel=0.01)


def test_old_measurements_of_other_sizes_are_dropped() -> None:
    """One slow step, while another process had the CPU, does not count forever."""
    times = times_of(t8=100.0)
    for _ in range(FORGOTTEN):
        times.observe(1, 1.0)
    assert times.seconds(8) == 100.0
    times.observe(1, 1.0)
    assert times.seconds(8) == 1.0


def test_all_draft_tokens_are_verified_if_tokens_are_free() -> None:
    times = times_of(t1=1.0, t64=1.0)
    assert lengths([4, 2, 0], [0.5, 0.9, 0.9], 1, times) == [4, 2, 0]


def test_no_draft_tokens_are_verified_at_full_cost_per_token() -> None:
    times = times_of(t1=1.0, t64=64.0)
    assert lengths([4, 4], [0.6, 0.9], 0, times) == [0, 0]


def test_likely_draft_tokens_come_first() -> None:
    """Four tokens cost as much as two, and eight cost four times as much."""
    times = times_of(t2=2.0, t4=2.0, t8=8.0)
    assert lengths([4, 4], [0.9, 0.3], 0, times) == [2, 0]


def test_long_draft_may_pay_off_where_its_first_token_does_not() -> None:
    """Two tokens cost 70 % more than one, and six cost 75 % more."""
    times = times_of(t1=1.0, t2=1.7, t6=1.75)
    assert lengths([5], [0.7], 0, times) == [5]
    assert lengths([1], [0.75], 0, times) == [1]
    assert lengths([1], [0.6], 0, times) == [0]


def test_whole_drafts_are_verified_before_any_measurement() -> None:
    assert lengths([3, 1], [0.1, 0.1], 0, StepTimes()) == [3, 1]


def test_chance_follows_the_acceptance_of_drafts() -> None:
    right, wrong, half = Chance(), Chance(), Chance()
    for _ in range(60):
        right.observe(4, 4)
        wrong.observe(4, 0)
        half.observe(1, 1)
        half.observe(1, 0)
    assert right.value > 0.99
    assert wrong.value < 0.01
    assert 0.4 < half.value < 0.6
    for _ in range(1000):
        wrong.hope()
    assert wrong.value == FIRST_CHANCE, "the chance recovers, so that drafts are tried again"


def test_time_to_make_drafts_counts_as_a_cost() -> None:
    """Drafts that are always right do not pay off if making them takes as long as a step."""
    times = StepTimes()
    times.observe(1, 1.0)
    times.observe(8, 1.0)
    assert lengths([4], [1.0], 0, times) == [4]
    assert lengths([4], [1.0], 0, times, lambda num: 0.2 * num) == [4]
    assert lengths([4], [1.0], 0, times, lambda num: 1.1 * num) == [0]
    assert lengths([4, 4], [0.9, 0.1], 0, times, lambda num: 0.3 * num)[1] <= 1


def test_first_draft_token_pays_for_the_slower_step() -> None:
    """A step with draft tokens takes 50 % longer."""
    times, verified = times_of(t1=1.0, t64=1.0), times_of(t2=1.5, t8=1.5)
    assert lengths([1], [0.4], 0, times, verified=verified) == [0]
    assert lengths([1], [0.6], 0, times, verified=verified) == [1]
    assert lengths([4], [0.4], 0, times, verified=verified) == [3]


def test_drafts_stay_within_the_token_budget() -> None:
    """Larger steps would be cut to the budget, so their times would stay unknown."""
    plain, verified = times_of(t64=8.0), times_of(t256=60.0)
    drafts, chances = [8] * 64, [0.9] * 64
    assert sum(lengths(drafts, chances, 0, plain, verified=verified)) > 256 - 64
    assert not any(lengths(drafts, chances, 0, plain, verified=verified, max_tokens=256))
    free = times_of(t64=8.0, t256=8.0)
    assert sum(lengths(drafts, chances, 0, free, max_tokens=256)) == 256 - 64


def test_measurements_are_dropped_after_many_steps_without_drafts() -> None:
    verified = times_of(t8=100.0)
    for _ in range(FORGOTTEN + 1):
        assert verified.seconds(8) == 100.0
        verified.pass_one()
    assert verified.seconds(8) is None


def test_lengths_use_the_chance_of_each_token() -> None:
    times = times_of(t1=1.0, t4=1.3, t8=2.0)
    assert lengths([3], [[1.0, 1.0, 1.0]], 0, times) == [3]
    assert lengths([7], [[1.0, 1.0, 1.0, 0.1, 1.0, 1.0, 1.0]], 0, times) == [3]
    assert lengths([7], [[1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0]], 0, times) == [7]


def test_gain_below_min_gain_is_ignored() -> None:
    """Two tokens for slightly less than twice the time."""
    assert lengths([1], [1.0], 0, times_of(t1=1.0, t2=2.0 / MIN_GAIN + 0.01)) == [0]
    assert lengths([1], [1.0], 0, times_of(t1=1.0, t2=2.0 / MIN_GAIN - 0.01)) == [1]


@pytest.mark.parametrize("seed", range(8))
def test_chosen_lengths_are_the_fastest(seed: int) -> None:
    """Compared with all lengths of three rows. Costs grow with the size of the step."""
    choose = random.Random(seed)
    times, verified = StepTimes(), StepTimes()
    costs = sorted(choose.uniform(1.0, 2.0) for _ in range(3))
    for size, seconds in zip((4, 6, 16), costs, strict=True):
        times.observe(size, seconds)
        verified.observe(size, 1.01 * seconds)
    limits = [choose.randrange(5) for _ in range(3)]
    chances = [[choose.uniform(0.5, 1.0) for _ in range(num)] for num in limits]

    def rate(nums: tuple[int, ...]) -> float:
        gained, taken = 4.0, verified if any(nums) else times
        for row, num in zip(chances, nums, strict=True):
            gain = 1.0
            for chance in row[:num]:
                gain *= chance
                gained += gain
        return gained / (taken.seconds(4 + sum(nums)) or 0.0)

    best = max(product(*(range(num + 1) for num in limits)), key=rate)
    found = tuple(lengths(limits, chances, 1, times, verified=verified))
    least = rate(best) if rate(best) > MIN_GAIN * rate((0, 0, 0)) else rate((0, 0, 0))
    assert rate(found) == pytest.approx(least)


def test_choice_for_many_rows_takes_few_milliseconds() -> None:
    """By the CPU time of the best of five. Such a step takes tens of milliseconds."""
    times = times_of(t256=0.02, t1024=0.08)
    best = 1.0
    for _ in range(5):
        began = time.process_time()
        lengths([4] * 256, [0.7] * 256, 0, times)
        best = min(best, time.process_time() - began)
    assert best < 0.005


def test_size_is_known_after_two_measurements() -> None:
    times = StepTimes()
    for is_known in (False, False, True):
        assert times.is_known(5) == is_known
        times.observe(6, 1.0)
    assert not times.is_known(12)


@pytest.mark.parametrize(("chance", "num"), [(0.01, 1), (0.3, 3), (0.7, 9), (1.0, 32)])
def test_improbable_draft_tokens_are_not_looked_up(chance: float, num: int) -> None:
    assert max_likely(chance) == num
    if num < 32:
        assert chance ** (num + 1) < MIN_CHANCE
