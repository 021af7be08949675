"""A shared prefix saves exactly what text H's formula gives, if no block is partly filled."""

from fractions import Fraction

from benchmarks.memory.prefix_savings import SCENARIOS, Held, Scenario, dividing_size, measure

SMALL = Scenario("small", shared=120, own=60, num_requests=7, reported=0.0)


def test_formula_equals_values_computed_by_hand() -> None:
    """Two requests of 10 tokens that share 5 hold 15 tokens, instead of 20."""
    assert Scenario("", shared=5, own=5, num_requests=2, reported=0.0).formula == Fraction(1, 4)
    found = [round(float(scenario.formula), 3) for scenario in SCENARIOS]
    assert found == [0.703, 0.842, 0.603, 0.197, 0.0]


def test_block_savings_equal_the_formula() -> None:
    """Block sizes that do not divide the lengths save less, by the partly filled blocks."""
    scenario, size = SCENARIOS[0], dividing_size()
    held = measure(scenario, size)
    own, shared = scenario.num_requests * (scenario.own // size), scenario.shared // size
    assert held == Held(shared + own, scenario.num_requests * shared + own)
    assert held.savings == scenario.formula
    for size in (1, 2, 5, 12, 20, 60):
        assert measure(SMALL, size).savings == SMALL.formula, size
    for size in (7, 16, 32, 100, 150):
        saved = measure(SMALL, size).savings
        assert saved == SMALL.formula - SMALL.lost_prefix(size) - SMALL.lost_end(size), size
        assert saved == Fraction(6, 7) * Fraction(120 // size, -(-180 // size)) < SMALL.formula
    held = measure(SMALL, 12, enable_prefix_caching=False)
    assert held.distinct == held.alone == 7 * 15, "no block is shared without prefix caching"
