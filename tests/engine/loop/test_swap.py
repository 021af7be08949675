"""Preemption by swapping restores the blocks exactly, and is chosen where it is cheaper."""

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
    """Return groups in a pool with blocks for little more than one long sequence."""
    folder = checkpoint(architecture)
    pool = pool_bytes(folder, 17, 4)
    groups = Groups(architecture, kv_cache_memory_bytes=pool, watermark=0.0, **settings)
    for name, prompt in PROMPTS.items():
        groups.submit(name, prompt, 1, temperature=0.0, max_tokens=LENGTH)
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
def test_swapped_requests_give_the_outputs_of_a_large_pool(architecture: str, backend: str) -> None:
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
def test_asynchronous_copies_preserve_outputs(
    is_late: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies finish as late as possible or at any time, as on a GPU, and with too few slots."""
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
def test_auto_mode_swaps_only_if_copies_are_cheaper(copy_rate: float, swaps: bool) -> None:
    """Without a measurement, sequences are recomputed."""
    groups = small(preemption_mode="auto", max_num_seqs=4)
    groups.core.scheduler.control(MeasuredRates(1000.0, copy_rate), 0.0)
    groups.core.control = lambda message: None  # type: ignore[method-assign]
    groups.finish()
    assert (groups.num_moves["swap_out"] > 0) == swaps


def test_copy_and_prefill_rates_are_measured() -> None:
    groups = Groups(max_num_seqs=4)
    assert groups.core.scheduler.memory.rates.copy_bytes_per_s > 1e6
    assert groups.core.scheduler.memory.rates.prefill_tokens_per_s == 0.0
    groups.submit("a", list(range(1, 50)), 1)
    groups.finish()
    assert groups.core.scheduler.memory.rates.prefill_tokens_per_s > 0.0


def test_abort_of_swapped_requests_frees_their_host_blocks() -> None:
    groups = small(preemption_mode="swap", max_num_seqs=4)
    scheduler = groups.core.scheduler
    while not any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        groups.step()
    for name in PROMPTS:
        groups.core.control(Abort(name))
    assert not any(pool.num_used for pool in scheduler.memory.kv.host_pools)
    groups.finish()


def test_swapped_requests_resume_before_new_ones_are_admitted() -> None:
    groups = small(preemption_mode="swap", max_num_seqs=4)
    scheduler = groups.core.scheduler
    while not any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        groups.step()
    groups.submit("new", [1, 2, 3], 1, temperature=0.0, max_tokens=3)
    while any(pool.num_used for pool in scheduler.memory.kv.host_pools):
        assert ("new", 0) not in groups.samples
        groups.step()
    groups.finish()
    assert len(groups.samples["new", 0]) == 3
