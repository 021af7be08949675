"""Preemption by swapping: what comes back is what went out, and the cheaper way is chosen."""

from typing import Any

import numpy as np
import pytest

from quire.base.messages import Abort, MeasuredRates
from quire.ops.blocks import host_blocks
from tests.engine.loop.test_groups import Groups
from tests.support.kernels.late_streams import LateStreams
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes, reference_tokens

PROMPTS = {"a": [5, 6, 7], "b": [90, 2, 2, 8, 41], "c": [7, 3, 9, 1, 12, 44, 5, 80]}
LENGTH = 40
FEW_SLOTS = {"streams": None, "part_bytes": 1, "num_slots": 2}


def small(architecture: str = "llama", **settings: Any) -> Groups:
    """Room for one long sequence, and a bit of another."""
    folder = checkpoint(architecture)
    pool = pool_bytes(folder, 17, 4)
    groups = Groups(architecture, kv_cache_memory_bytes=pool, watermark=0.0, **settings)
    for name, prompt in PROMPTS.items():
        groups.ask(name, prompt, 1, temperature=0.0, max_tokens=LENGTH)
    return groups


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        ("qwen3", "torch"),
        pytest.param("llama", "reference", marks=pytest.mark.slow),
        pytest.param("llama", "torch", marks=pytest.mark.slow),
        pytest.param("qwen3", "reference", marks=pytest.mark.slow),
    ],
)
def test_outputs_are_those_of_a_large_pool(architecture: str, backend: str) -> None:
    """In every backend."""
    groups = small(
        architecture,
        preemption_mode="swap",
        attention_backend=backend,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    groups.finish()
    assert groups.num_moves["swap_out"] > 0
    for name, prompt in PROMPTS.items():
        expected = reference_tokens(checkpoint(architecture), prompt, LENGTH)
        assert groups.samples[name, 0] == expected


@pytest.mark.parametrize(
    ("is_late", "backend"),
    [
        (True, "torch"),
        (False, "reference"),
        pytest.param(True, "reference", marks=pytest.mark.slow),
        pytest.param(False, "torch", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_cross_beside_the_steps(
    is_late: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, as late as may be or at any time, and with too few slots."""
    chance = None if is_late else np.random.default_rng(0)
    monkeypatch.setattr(
        host_blocks, "streams_of", lambda tensor: LateStreams(chance, is_prompt=True)
    )
    monkeypatch.setattr(host_blocks.HostBlocks.__init__, "__kwdefaults__", FEW_SLOTS)
    groups = small(preemption_mode="swap", attention_backend=backend, max_num_seqs=4)
    groups.finish()
    assert groups.num_moves["swap_out"] > 0
    for name, prompt in PROMPTS.items():
        assert groups.samples[name, 0] == reference_tokens(checkpoint("llama"), prompt, LENGTH)


@pytest.mark.parametrize(("copy_rate", "swaps"), [(1e12, True), (1.0, False), (0.0, False)])
def test_the_cheaper_way_is_chosen(copy_rate: float, swaps: bool) -> None:
    """Both sides of the crossing; without a measurement it is recomputation."""
    groups = small(preemption_mode="auto", max_num_seqs=4)
    groups.core.scheduler.control(MeasuredRates(1000.0, copy_rate), 0.0)
    groups.core.control = lambda message: None  # type: ignore[method-assign]
    groups.finish()
    assert (groups.num_moves["swap_out"] > 0) == swaps


def test_rates_are_measured() -> None:
    groups = Groups(max_num_seqs=4)
    assert groups.core.scheduler.memory.rates.copy_bytes_per_s > 1e6
    assert groups.core.scheduler.memory.rates.prefill_tokens_per_s == 0.0
    groups.ask("a", list(range(1, 50)), 1)
    groups.finish()
    assert groups.core.scheduler.memory.rates.prefill_tokens_per_s > 0.0


def test_an_abort_while_swapped_out_frees_the_host_blocks() -> None:
    groups = small(preemption_mode="swap", max_num_seqs=4)
    scheduler = groups.core.scheduler
    while not any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        groups.step()
    for name in PROMPTS:
        groups.core.control(Abort(name))
    assert not any(pool.num_used for pool in scheduler.memory.kv.host_pools)
    groups.finish()


def test_nobody_comes_in_before_those_that_were_swapped_out() -> None:
    groups = small(preemption_mode="swap", max_num_seqs=4)
    scheduler = groups.core.scheduler
    while not any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        groups.step()
    groups.ask("new", [1, 2, 3], 1, temperature=0.0, max_tokens=3)
    while any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        assert ("new", 0) not in groups.samples
        groups.step()
    groups.finish()
    assert len(groups.samples["new", 0]) == 3
