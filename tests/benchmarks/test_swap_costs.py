"""The costs of swapping and of recomputation by formula, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.virtual.swap_costs import (
    Device,
    Victim,
    batched_s,
    chooses_swap,
    crossing_block_size,
    engine_rates,
    link_for_ratio,
    per_block_s,
    recompute_s,
)
from quire.base.cache_group import CacheGroup
from quire.base.messages import MeasuredRates

VICTIM = Victim(
    CacheGroup("full", (0, 1, 2), 4, 8), num_parameters=1e6, num_tokens=60, block_size=4
)
TOKEN_BYTES = 2 * 3 * 4 * 8 * 2
DEVICE = Device("d", link=1e6, transfer_s=1e-5, memory=1e8, host=1e7, flops_per_s=2e9)


def test_bytes_and_transfers_count_whole_blocks() -> None:
    assert (VICTIM.num_blocks, VICTIM.num_bytes) == (15, 60 * TOKEN_BYTES)
    assert VICTIM.num_transfers == 15 * 3 * 2
    longer = replace(VICTIM, num_tokens=61)
    assert (longer.num_blocks, longer.num_bytes) == (16, 64 * TOKEN_BYTES)


def test_costs_are_those_of_the_docstring() -> None:
    num_bytes = 60 * TOKEN_BYTES
    assert per_block_s(VICTIM, DEVICE) == pytest.approx(2 * (90 * 1e-5 + num_bytes / 1e6))
    staging = 2 * num_bytes / 1e8 + 2 * num_bytes / 1e7
    assert batched_s(VICTIM, DEVICE) == pytest.approx(2 * (1e-5 + num_bytes / 1e6 + staging))
    assert recompute_s(VICTIM, DEVICE) == pytest.approx(2 * 1e6 * 60 / 2e9)


def test_one_transfer_does_not_depend_on_the_block_size() -> None:
    sizes = (1, 2, 4, 12, 60)
    batched = {batched_s(replace(VICTIM, block_size=size), DEVICE) for size in sizes}
    assert len(batched) == 1
    each = [per_block_s(replace(VICTIM, block_size=size), DEVICE) for size in sizes]
    assert each == sorted(each, reverse=True) and each[0] > each[-1]


def test_at_the_crossing_both_take_as_long() -> None:
    size = crossing_block_size(VICTIM, replace(DEVICE, flops_per_s=2.5e9))
    assert size is not None
    fast = replace(DEVICE, flops_per_s=2.5e9)
    # As a real number of blocks, which a victim cannot have: the formula, by hand.
    swap = 2 * (2 * 3 * 60 / size * 1e-5 + 60 * TOKEN_BYTES / 1e6)
    assert swap == pytest.approx(recompute_s(VICTIM, fast))
    assert crossing_block_size(VICTIM, replace(DEVICE, flops_per_s=1e12)) is None


def test_the_link_gives_the_ratio() -> None:
    link = link_for_ratio(VICTIM, DEVICE, 1.2)
    slow = replace(DEVICE, link=link)
    assert recompute_s(VICTIM, slow) == pytest.approx(1.2 * per_block_s(VICTIM, slow))
    with pytest.raises(ValueError, match="no link"):
        link_for_ratio(VICTIM, DEVICE, 1e6)


def test_rates_are_those_of_a_prefill_and_of_one_way() -> None:
    slow = replace(DEVICE, transfer_s=0.0)
    rates = engine_rates(VICTIM, slow, per_block_s)
    assert rates.copy_bytes_per_s == pytest.approx(1e6)
    assert rates.prefill_tokens_per_s == pytest.approx(2e9 / 2e6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_scheduler_compares_both_costs(block_size: int) -> None:
    """Just below and just above the rate at which they are equal."""
    victim = replace(VICTIM, block_size=block_size)
    equal = 2 * victim.num_bytes * 1000.0 / victim.num_tokens
    assert not chooses_swap(victim, MeasuredRates(1000.0, equal * 0.99))
    assert chooses_swap(victim, MeasuredRates(1000.0, equal * 1.01))
    assert not chooses_swap(victim, MeasuredRates(1000.0, 0.0))
