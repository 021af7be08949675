"""Whole models with the Triton backend: the same greedy tokens as with torch's."""

import pytest
import torch

from quire import LLM, SamplingParams
from tests.serve.checkpoints import ARCHITECTURES, checkpoint

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 97 for j in range(5 + 9 * i)]} for i in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def tokens(architecture: str, backend: str, device: torch.device) -> list[list[int]]:
    """Prompts are cut into chunks, which share steps with rows that decode."""
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "disable_log_stats": True}
    settings |= {"max_num_batched_tokens": 24, "max_num_seqs": 3, "device": device.type}
    with LLM(str(checkpoint(architecture)), attention_backend=backend, **settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_the_same(architecture: str, device: torch.device) -> None:
    assert tokens(architecture, "triton", device) == tokens(architecture, "torch", device)
