"""Whole models give the same tokens with the kernels as with torch's operations.

Without a GPU the tensors stay on the CPU, where Triton's interpreter runs the kernels. Operations
take a GPU's path, and the C++ core is disabled.
"""

from collections.abc import Iterator

import pytest
import torch

from quire import LLM, SamplingParams
from quire.ops import gpu
from quire.ops.host import native
from quire.ops.kernels.launch import INTERPRETED
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import checkpoint

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(3 + 9 * i)]} for i in range(3)]
SETTINGS = {
    "dtype": "float32",
    "attention_backend": "torch",
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 22,
    "disable_log_stats": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Record the names of the kernel modules that are loaded."""
    found: set[str] = set()
    load = gpu.load_kernels
    monkeypatch.setattr(gpu, "load_kernels", lambda name: found.add(name) or load(name))
    if INTERPRETED:
        native.core.cache_clear()
        monkeypatch.setattr(native, "INTERFACE_VERSION", -1)
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
        with pytest.warns(UserWarning, match="it was built from other sources"):
            assert native.core() is None
    yield found
    native.core.cache_clear()


def run(architecture: str, dtype: str, device: str) -> tuple[list[list[int]], torch.Tensor]:
    settings = SETTINGS | {"dtype": dtype, "device": device}
    with LLM(str(checkpoint(architecture)), **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    logprobs = [
        [position[token].logprob for position, token in zip(o.outputs[0].logprobs, t, strict=True)]
        for o, t in zip(outputs, tokens, strict=True)
    ]
    return tokens, torch.tensor(logprobs)


@pytest.mark.parametrize(
    "architecture",
    slow_but(
        ["llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "olmo2"],
        "qwen3_moe",
        "gemma2",
    ),
)
def test_kernels_generate_the_tokens_of_torch(
    architecture: str, used: set[str], monkeypatch
) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    tokens, logprobs = run(architecture, "float32", device)
    assert used >= {"norm", "embedding", "sampling.logprobs"}
    assert ("moe" in used) == (architecture == "qwen3_moe")
    assert "moe" in used or "gate" in used  # experts fuse the gate with their products
    used.clear()
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    wanted, wanted_logprobs = run(architecture, "float32", device)
    assert not used
    assert tokens == wanted
    torch.testing.assert_close(logprobs, wanted_logprobs, atol=2e-4, rtol=0)


def test_seeded_tokens_equal_those_of_torch(used: set[str], monkeypatch) -> None:
    """Plain and filtered rows share the steps."""
    device = "cpu" if INTERPRETED else "cuda"
    plain = SamplingParams(temperature=0.9, seed=1, max_tokens=5, ignore_eos=True)
    filters = {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    filtered = SamplingParams(**filters, seed=2, max_tokens=5, ignore_eos=True)
    found = []
    for has_triton in (True, False):
        monkeypatch.setattr(gpu, "has_triton", lambda has_triton=has_triton: has_triton)
        with LLM(str(checkpoint("llama")), device=device, **SETTINGS) as llm:
            outputs = llm.generate(PROMPTS, [plain, filtered, plain], use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert ("row_deltas" in used) == has_triton  # and other kernels for rows and tokens
        used.clear()
    assert found[0] == found[1]


def test_float64_uses_torchs_operations(used: set[str]) -> None:
    run("llama", "float64", "cpu" if INTERPRETED else "cuda")
    # Kernels for row state and moves of blocks do not depend on the dtype.
    assert used <= {"row_deltas", "blocks"}
