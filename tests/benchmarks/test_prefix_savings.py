"""What a shared prefix saves is text H's formula, exactly, where no block is partly filled."""

from fractions import Fraction

import pytest

from benchmarks.memory.prefix_savings import (
    BLOCK_SIZE,
    QUESTION,
    SCENARIOS,
    Held,
    Scenario,
    dividing_size,
    measure,
)
from benchmarks.virtual.dry_run import VOCAB_SIZE
from quire.tools.workloads import shared_prefix_prompts

SMALL = Scenario("small", shared=120, own=60, num_requests=7, told=0.0)


def test_the_formula_by_hand() -> None:
    """Two of 10 tokens that share 5 hold 15, where alone they would hold 20."""
    assert Scenario("", shared=5, own=5, num_requests=2, told=0.0).formula == Fraction(1, 4)
    found = [round(float(scenario.formula), 3) for scenario in SCENARIOS]
    assert found == [0.703, 0.842, 0.603, 0.197, 0.0]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_blocks_that_divide_all_lengths_save_what_the_formula_says(scenario: Scenario) -> None:
    size = dividing_size()
    assert scenario.shared % size == scenario.total % size == 0
    held = measure(scenario, size)
    own = scenario.num_requests * (scenario.own // size)
    shared = scenario.shared // size
    assert held == Held(shared + own, scenario.num_requests * shared + own)
    assert held.savings == scenario.formula


@pytest.mark.parametrize("size", [1, 2, 5, 12, 20, 60])
def test_the_formula_holds_for_every_block_size_that_divides(size: int) -> None:
    assert measure(SMALL, size).savings == SMALL.formula


@pytest.mark.parametrize("size", [7, 16, 32, 100, 150])
def test_other_block_sizes_save_less_by_what_is_not_in_full_blocks(size: int) -> None:
    saved = measure(SMALL, size).savings
    assert saved == SMALL.formula - SMALL.lost_prefix(size) - SMALL.lost_end(size)
    assert saved < SMALL.formula
    assert saved == Fraction(6, 7) * Fraction(120 // size, -(-180 // size))


def test_without_prefix_caching_nothing_is_saved() -> None:
    for size in (dividing_size(), BLOCK_SIZE):
        held = measure(SCENARIOS[0], size, enable_prefix_caching=False)
        assert held.distinct == held.alone
    on = measure(SCENARIOS[0], BLOCK_SIZE)
    assert on.alone == held.alone, "the sum over requests is what they hold if nothing is shared"


def test_own_tokens_that_are_not_different_would_be_shared_too() -> None:
    """So the formula holds because the requests' own tokens differ."""
    size = 10
    (prompt,) = shared_prefix_prompts(1, SMALL.shared, QUESTION, VOCAB_SIZE, seed=0)
    held = measure(SMALL, size, [prompt] * SMALL.num_requests)
    # All but the last block of the prompt, of which each request computes a token itself.
    assert held.distinct == 13 + SMALL.num_requests * 5
    assert held.savings > measure(SMALL, size).savings == SMALL.formula


def test_the_requests_stand_alone_as_each_is_counted() -> None:
    one = Scenario("one", SMALL.shared, SMALL.own, num_requests=1, told=0.0)
    for size in (12, BLOCK_SIZE):
        held = measure(one, size)
        assert held.distinct == held.alone == -(-SMALL.total // size)
        assert measure(SMALL, size).alone == SMALL.num_requests * held.alone
