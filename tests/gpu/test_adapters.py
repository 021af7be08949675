"""Adapters on a GPU: recorded and eager steps give the tokens of torch on a CPU.

`make gpu-check PART=models` runs these; elsewhere they are not collected.
"""

from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from tests.gpu.test_runner import MODES
from tests.support.models.reference_checkpoints import checkpoint
from tests.support.runner.adapters import adaptable_shapes, write_adapter

pytestmark = pytest.mark.gpu

RANKS = 1, 8, 64, 256
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(5 + 9 * i)]} for i in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 1 << 26, "disable_log_stats": True,
    "enable_lora": True, "max_lora_rank": 256,
}  # fmt: skip


def rounds(adapters: list[LoRARequest | None], num: int, **settings: Any) -> list[list[list[int]]]:
    """Return the tokens of each round. Each round assigns the adapters to other requests."""
    found = []
    with LLM(str(checkpoint("llama")), **(SETTINGS | settings)) as llm:
        for i in range(num):
            given = [adapters[(i + j) % len(adapters)] for j in range(len(PROMPTS))]
            outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=given)
            found.append([list(each.outputs[0].token_ids) for each in outputs])
    return found


Wanted = tuple[list[LoRARequest | None], list[list[list[int]]]]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Return the adapters (the first is None) and the tokens of three rounds on a CPU."""
    folder, modules = tmp_path_factory.mktemp("adapters"), adaptable_shapes(checkpoint("llama"))
    adapters: list[LoRARequest | None] = [None]
    for rank in RANKS:
        path = write_adapter(folder / f"{rank}", modules, rank, seed=rank)
        adapters.append(LoRARequest(f"rank-{rank}", rank, str(path)))
    found = rounds(adapters, 3, device="cpu", attention_backend="torch", max_num_seqs=5)
    return adapters, found


@pytest.mark.parametrize(
    ("mode", "max_loras"), [("full", 8), ("full", 2), ("eager", 8), ("launched by the core", 8)]
)
def test_adapter_tokens_match_the_cpu(mode: str, max_loras: int, wanted: Wanted) -> None:
    adapters, tokens = wanted
    on_gpu: dict[str, Any] = {"device": "cuda", "debug_transfers": True, "max_loras": max_loras}
    assert rounds(adapters, 3, max_num_seqs=5, **on_gpu, **MODES[mode]) == tokens
