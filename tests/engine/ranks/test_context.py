"""Ranks that deal out sequences' tokens among each other: the same answers as in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.base.errors import ConfigError
from tests.support.cases import slow_but
from tests.support.engine.scenarios import COMMON, Answers, alone, answers_of, asked, told
from tests.support.models.reference_checkpoints import pool_bytes, text_checkpoint

TWO = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
FOUR = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}


def compare(ranks: dict[str, Any], architecture: str, num_blocks: int, **settings: Any) -> Answers:
    """Blocks are as many as in one process, although a rank's are smaller."""
    expected = alone(architecture, num_blocks, tuple(settings.items()))
    found = answers_of(text_checkpoint(architecture), num_blocks // 2, **settings, **ranks)
    for mine, theirs in zip(found.answers, expected.answers, strict=True):
        assert mine == theirs
    return found


def test_chunks_hits_groups_beams_masks_and_logprobs() -> None:
    assert compare(TWO, "multi_query", 120).num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(("swap", "recompute"), "swap"))
def test_who_gives_way_comes_back(mode: str) -> None:
    settings = {"preemption_mode": mode, "pipeline_depth": 2, "kv_host_gb": 0.001}
    found = compare(TWO, "multi_query", 30, **settings)
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
def test_guesses() -> None:
    settings = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})}
    assert compare(TWO, "multi_query", 120, **settings).num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", slow_but(("gpt_oss", "gemma2", "qwen3_5_text"), "gpt_oss", "qwen3_5_text")
)
def test_other_layers(architecture: str) -> None:
    """With windows, sinks, soft caps and states; two of four ranks have the same heads."""
    compare(FOUR, architecture, 240)


@pytest.mark.slow
def test_latent_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match="latent attention; remove decode_context_parallel_size"):
        LLM(str(text_checkpoint("deepseek_v3")), dtype="float64", **TWO)


@pytest.mark.slow
def test_in_stages() -> None:
    compare(TWO | {"pipeline_parallel_size": 2}, "multi_query", 120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, TWO], ids=["cores", "cores of two ranks"])
def test_two_cores_of_a_model_with_one_head_under_load(ranks: dict[str, Any]) -> None:
    """More requests than rows, in pools so small that rows are preempted all the time."""
    model = str(text_checkpoint("multi_query"))
    prompts, ways = zip(*asked() * 15, strict=True)
    found = []
    for more in ({}, ranks | {"data_parallel_size": 2}):
        memory = pool_bytes(Path(model), 40, 4) // (2 if "tensor_parallel_size" in more else 1)
        with LLM(model, kv_cache_memory_bytes=memory, **COMMON, **more) as llm:
            found.append(llm.generate(list(prompts), list(ways), use_tqdm=False))
    for one, other in zip(*found, strict=True):
        assert told(one) == told(other)


@pytest.mark.slow
def test_who_has_not_the_same_heads_is_told_the_numbers() -> None:
    words = r"decode_context_parallel_size=2 does not divide the 1 of tensor_parallel_size=2 ranks"
    with pytest.raises(ConfigError, match=words):
        LLM(str(text_checkpoint("llama")), dtype="float64", **TWO)
