"""Evicted blocks wait in host memory and return as prefix hits. Outputs are bit-identical to those
without a host tier.

Covers `kv/host_tier.py`.
"""

from typing import Any

import pytest

from quire import SamplingParams
from quire.base.errors import ConfigError
from quire.ops.host.native import core
from tests.serve.test_same_bits import Found, found, open_llm
from tests.support.models.checkpoints import random_tokens
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_tokens(*[40] * 4, seed=3)]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True, logprobs=2)
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 keys and values": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "torch": {"dtype": "float32", "attention_backend": "torch"},
    "reference": {"dtype": "float32", "attention_backend": "reference"},
}
QUICK = {  # mistral has a window
    "qwen3": ("bfloat16", "torch"),
    "mistral": ("int8 keys and values",),
    "llama4_text": (),
}


def run(architecture: str, **settings: Any) -> tuple[Found, list[int]]:
    """Run all prompts one by one, twice; return the outputs and the cached tokens of each."""
    outputs = []
    with open_llm(architecture, max_num_batched_tokens=16, **settings) as llm:
        for prompt in PROMPTS * 2:
            outputs += llm.generate([prompt], PARAMS, use_tqdm=False)
    return found(outputs), [output.num_cached_tokens or 0 for output in outputs]


def tokens(outputs: Found) -> list[list[int]]:
    return [[token for token, _ in output] for output in outputs]


@needs_core
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(architecture, name, marks=[] if name in quick else pytest.mark.slow)
        for architecture, quick in QUICK.items()
        for name in CASES
    ],
)
def test_evicted_blocks_return_from_host_memory(architecture: str, name: str) -> None:
    settings = CASES[name]
    wanted, _ = run(architecture, enable_prefix_caching=False, **settings)
    pool = pool_bytes(checkpoint(architecture), 18, 4, 4)
    if settings["dtype"] == "bfloat16":
        pool //= 2
    few = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1}
    got, cached = run(architecture, **few, **settings)
    assert tokens(got) == tokens(wanted)
    assert sum(cached) < 40, "the pool is too large for this test"
    got, cached = run(architecture, kv_host_gb=0.01, **few, **settings)
    assert tokens(got) == tokens(wanted)
    if "attention_backend" not in settings:  # bits of other backends depend on the chunks
        assert got == wanted
    assert cached == [0] * len(PROMPTS) + [36] * len(PROMPTS)


@needs_core
def test_full_tier_evicts_blocks_and_changes_no_output() -> None:
    pool = pool_bytes(checkpoint("qwen3"), 18, 4, 4)
    few = {"kv_cache_memory_bytes": pool, "max_num_seqs": 1, "dtype": "float32"}
    wanted, _ = run("qwen3", **few)
    # Room for two prompts and their outputs: none survives the other three.
    got, cached = run("qwen3", kv_host_gb=pool * 20 / 18 / 1e9, **few)
    assert got == wanted
    assert sum(cached) < 40


def test_impossible_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="kv_host_gb=1e-09 holds no block"):
        open_llm("qwen3", kv_host_gb=1e-9)
    with pytest.raises(ConfigError, match="kv_host_gb=1e.06 is more than the free memory"):
        open_llm("qwen3", kv_host_gb=1e6)
