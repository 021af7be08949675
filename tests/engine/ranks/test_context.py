"""Ranks that divide sequences' tokens among each other give the same outputs as one process."""

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
    """Use as many blocks as in one process, although each rank's blocks are smaller."""
    expected = alone(architecture, num_blocks, tuple(settings.items()))
    found = answers_of(text_checkpoint(architecture), num_blocks // 2, **settings, **ranks)
    for mine, theirs in zip(found.answers, expected.answers, strict=True):
        assert mine == theirs
    return found


def test_context_parallel_ranks_match_one_process() -> None:
    assert compare(TWO, "multi_query", 120).num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(("swap", "recompute"), "swap"))
def test_preempted_rows_resume(mode: str) -> None:
    settings = {"preemption_mode": mode, "pipeline_depth": 2, "kv_host_gb": 0.001}
    found = compare(TWO, "multi_query", 30, **settings)
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
def test_ngram_drafts_are_verified() -> None:
    settings = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})}
    assert compare(TWO, "multi_query", 120, **settings).num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", slow_but(("gpt_oss", "gemma2", "qwen3_5_text"), "gpt_oss", "qwen3_5_text")
)
def test_other_layers_match(architecture: str) -> None:
    """The layers have windows, sinks, soft caps and states. Two of the four ranks have the same
    heads."""
    compare(FOUR, architecture, 240)


@pytest.mark.slow
def test_latent_attention_is_rejected() -> None:
    with pytest.raises(ConfigError, match="latent attention; remove decode_context_parallel_size"):
        LLM(str(text_checkpoint("deepseek_v3")), dtype="float64", **TWO)


@pytest.mark.slow
def test_stages_of_context_parallel_ranks_match() -> None:
    compare(TWO | {"pipeline_parallel_size": 2}, "multi_query", 120)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{}, TWO], ids=["cores", "cores of two ranks"])
def test_two_cores_match_one_core_under_load(ranks: dict[str, Any]) -> None:
    """There are more requests than rows, and the pools are so small that rows are preempted all the
    time."""
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
def test_indivisible_number_of_ranks_is_named() -> None:
    words = r"decode_context_parallel_size=2 does not divide the 1 of tensor_parallel_size=2 ranks"
    with pytest.raises(ConfigError, match=words):
        LLM(str(text_checkpoint("llama")), dtype="float64", **TWO)
