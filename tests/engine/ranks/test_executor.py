"""Plans that rank processes execute give the same outputs as in the engine's own process.

Covers `engine/ranks/executor.py`, `engine/ranks/rank_main.py`, `engine/ranks/launch.py`.
"""

import json
from typing import Any

import pytest

from tests.support.cases import in_turn, slow_but
from tests.support.engine.scenarios import Answers, alone, answers_of
from tests.support.models.reference_checkpoints import text_checkpoint

MP = {"distributed_executor_backend": "mp"}
TWO = {"tensor_parallel_size": 2}
FOUR = {"tensor_parallel_size": 4}


def compare(ranks: dict[str, Any], architecture: str, num_blocks: int, **settings: Any) -> Answers:
    expected = alone(architecture, num_blocks, tuple(settings.items()))
    found = answers_of(text_checkpoint(architecture), num_blocks, **settings, **ranks)
    for mine, theirs in zip(found.answers, expected.answers, strict=True):
        assert mine == theirs
    return found


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_another_process_with_few_blocks_matches(mode: str) -> None:
    """Covers chunks, prefix hits, groups, beams, masks, log-probabilities and preempted rows that
    resume."""
    settings = {"preemption_mode": mode, "pipeline_depth": 2, "kv_host_gb": 0.001}
    found = compare(MP, "llama", 30, **settings)
    assert found.num_masked > 5
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
def test_two_ranks_with_a_draft_model_match() -> None:
    """Covers chunks, prefix hits, groups, beams, masks, log-probabilities and draft tokens."""
    draft = {"method": "draft_model", "model": str(text_checkpoint("gpt2"))}
    settings = {"speculative_config": json.dumps(draft | {"num_speculative_tokens": 3})}
    found = compare(TWO, "llama", 120, **settings)
    assert found.num_masked > 5 and found.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [MP, TWO])
def test_ranks_match_one_process(ranks: dict[str, Any]) -> None:
    """Runs without preemption and draft tokens, unlike the two tests above."""
    assert compare(ranks, "llama", 120).num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ranks"),
    [
        ("qwen3_moe", TWO),
        ("qwen3_5", TWO),
        ("gpt_oss", TWO),
        ("gpt2", TWO),
        ("deepseek_v3", TWO),
        ("llama4_text", TWO),
        ("llama", FOUR),
    ],
)
def test_layers_of_all_kinds_are_divided_among_ranks(
    architecture: str, ranks: dict[str, Any]
) -> None:
    """Mixtures, states, sinks, windows, chunks and latent vectors. Two of the four ranks have the
    same heads."""
    assert compare(ranks, architecture, 240).num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(("swap", "recompute"), "swap"))
def test_preempted_rows_resume_on_all_ranks(mode: str) -> None:
    """A rank has half of the heads, and so twice as many blocks."""
    settings = {"preemption_mode": mode, "kv_host_gb": 0.001}
    found = answers_of(text_checkpoint("llama"), 15, **settings, **TWO)
    assert found.answers == alone("llama", 30, tuple(settings.items())).answers
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "mode"), in_turn(("deepseek_v3", "llama4_text"), ("swap", "recompute"))
)
def test_preempted_rows_with_latent_vectors_or_chunks_match(architecture: str, mode: str) -> None:
    """Preempted rows of a full pool have the outputs of an engine with spare blocks."""
    settings = {"preemption_mode": mode, "kv_host_gb": 0.001}
    found = answers_of(text_checkpoint(architecture), 30, **settings)
    assert found.answers == alone(architecture, 240, ()).answers
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", slow_but(("llama", "deepseek_v3", "llama4_text"), "deepseek_v3")
)
def test_ngram_drafts_are_verified_by_all_ranks(architecture: str) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    found = compare(TWO, architecture, 240, speculative_config=json.dumps(speculation))
    assert found.num_draft_tokens > 0
