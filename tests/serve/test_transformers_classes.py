"""The whole engine with models that run on transformers' classes: greedy tokens match
transformers with chunks, reused blocks, prefix hits and preemption."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from quire.models.registry import model_spec
from tests.serve.test_exactness import (
    NUM_TOKENS,
    assert_idle,
    expected,
    greedy,
    open_llm,
    prompts,
    tokens,
)
from tests.support.models.reference_checkpoints import LLAMA_LIKE, NO_TOKENS, reference_tokens
from tests.support.render.tiny_tokenizers import fresh_directory

FAMILIES: dict[str, dict[str, Any]] = {
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 9},
}


@cache
def checkpoint(model_type: str) -> Path:
    """Return a checkpoint without a tokenizer and without end tokens."""
    folder = fresh_directory()
    torch.manual_seed(0)
    fields = LLAMA_LIKE | FAMILIES[model_type] | NO_TOKENS
    config = tf.AutoConfig.for_model(model_type, vocab_size=97, **fields)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        ("stablelm", "swap"),
        ("starcoder2", "recompute"),
        ("stablelm", "recompute"),
        ("starcoder2", "swap"),
    ],
)
def test_tokens_match_transformers(model_type: str, mode: str) -> None:
    folder = checkpoint(model_type)
    groups = model_spec(folder).cache_groups
    pool = 18 * sum(group.block_bytes(4, 8) for group in groups)  # so small that rows are preempted
    small = {"block_size": 4, "kv_cache_memory_bytes": pool, "preemption_mode": mode}
    for settings in ({"max_num_batched_tokens": 7}, small):
        with open_llm(folder, **settings) as llm:
            preempted = 0
            for _ in range(2):  # the second run has prefix hits
                outputs = llm.generate(prompts(), [greedy(count) for count in NUM_TOKENS])
                assert tokens(outputs) == expected(folder, tokens(outputs))
                preempted += sum(o.metrics.num_preemptions for o in outputs if o.metrics)
            is_small = "block_size" in settings
            assert (preempted > 0) == is_small
            assert is_small or sum(output.num_cached_tokens for output in outputs) > 0
            assert_idle(llm)


def test_float32_tokens_match_transformers() -> None:
    """The C++ core then computes linear layers and attention."""
    folder = checkpoint("stablelm")
    wanted = [reference_tokens(folder, *each) for each in zip(prompts(), NUM_TOKENS, strict=True)]
    with open_llm(folder, dtype="float32", attention_backend="auto") as llm:
        outputs = llm.generate(prompts(), [greedy(count) for count in NUM_TOKENS])
        assert tokens(outputs) == wanted
