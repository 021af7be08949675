"""The costs of swapping and of recomputation by formula, against numbers computed by hand."""

from dataclasses import replace

import pytest

from benchmarks.virtual.swap_costs import (
    Device,
    Victim,
    batched_s,
    chooses_swap,
    crossing_block_size,
    link_for_ratio,
    per_block_s,
    recompute_s,
)
from quire.base.messages import MeasuredRates
from quire.spec.cache_group import CacheGroup

VICTIM = Victim(
    CacheGroup("full", (0, 1, 2), 4, 8), num_parameters=1e6, num_tokens=60, block_size=4
)
TOKEN_BYTES = 2 * 3 * 4 * 8 * 2
DEVICE = Device("d", link=1e6, transfer_s=1e-5, memory=1e8, host=1e7, flops_per_s=2e9)


def test_costs_follow_the_documented_formula() -> None:
    """The cost of one large transfer does not depend on the block size; block transfers do."""
    num_bytes = 60 * TOKEN_BYTES
    assert (VICTIM.num_blocks, VICTIM.num_bytes) == (15, num_bytes)
    assert per_block_s(VICTIM, DEVICE) == pytest.approx(2 * (90 * 1e-5 + num_bytes / 1e6))
    staging = 2 * num_bytes / 1e8 + 2 * num_bytes / 1e7
    assert batched_s(VICTIM, DEVICE) == pytest.approx(2 * (1e-5 + num_bytes / 1e6 + staging))
    assert recompute_s(VICTIM, DEVICE) == pytest.approx(2 * 1e6 * 60 / 2e9)
    sizes = [replace(VICTIM, block_size=size) for size in (1, 2, 4, 12, 60)]
    assert len({batched_s(each, DEVICE) for each in sizes}) == 1
    costs = [per_block_s(each, DEVICE) for each in sizes]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


def test_costs_are_equal_at_the_crossing_block_size() -> None:
    fast = replace(DEVICE, flops_per_s=2.5e9)
    size = crossing_block_size(VICTIM, fast)
    assert size is not None
    # The formula by hand, with a fractional number of blocks, which no victim has.
    swap = 2 * (2 * 3 * 60 / size * 1e-5 + 60 * TOKEN_BYTES / 1e6)
    assert swap == pytest.approx(recompute_s(VICTIM, fast))
    assert crossing_block_size(VICTIM, replace(DEVICE, flops_per_s=1e12)) is None
    slow = replace(DEVICE, link=link_for_ratio(VICTIM, DEVICE, 1.2))
    assert recompute_s(VICTIM, slow) == pytest.approx(1.2 * per_block_s(VICTIM, slow))


def test_scheduler_compares_both_costs() -> None:
    """Rates just below and just above the equal cost give different choices."""
    for block_size in (1, 4, 16):
        victim = replace(VICTIM, block_size=block_size)
        equal = 2 * victim.num_bytes * 1000.0 / victim.num_tokens
        assert not chooses_swap(victim, MeasuredRates(1000.0, equal * 0.99)), block_size
        assert chooses_swap(victim, MeasuredRates(1000.0, equal * 1.01)), block_size
