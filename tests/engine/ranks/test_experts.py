"""Ranks with whole experts of a mixture serve what one process does."""

from typing import Any

from quire import LLM, SamplingParams
from tests.engine.ranks.scenarios import COMMON, WORDS
from tests.serve.checkpoints import checkpoint

EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def served(**settings: Any) -> list[list[int]]:
    asked = [
        SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.0, seed=4, top_p=0.8, ignore_eos=True),
    ]
    with LLM(str(checkpoint("qwen3_moe")), **(COMMON | settings)) as llm:
        outputs = llm.generate([WORDS] * len(asked), asked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def test_whole_experts_on_two_ranks() -> None:
    assert served(**EXPERTS) == served()
