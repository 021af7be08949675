"""A model in stages, each of one process or several, gives the same outputs as the engine's own
process."""

import json
from typing import Any

import pytest

from quire import LLM
from quire.base.errors import ConfigError
from tests.engine.ranks.test_executor import compare
from tests.support.cases import in_turn, slow_but
from tests.support.engine.scenarios import COMMON, alone, answers_of
from tests.support.models.reference_checkpoints import text_checkpoint

STAGES = {"pipeline_parallel_size": 2}
BOTH = STAGES | {"tensor_parallel_size": 2}


def test_stages_match_one_process() -> None:
    assert compare(STAGES, "llama", 120).num_masked > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "ranks"),
    in_turn(("llama", "qwen3_moe", "qwen3_5", "gpt2", "deepseek_v3"), (STAGES, BOTH)),
)
def test_other_architectures_and_stages_of_several_ranks_match(
    architecture: str, ranks: dict[str, Any]
) -> None:
    compare(ranks, architecture, 120)


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(("swap", "recompute"), "swap"))
def test_preempted_rows_resume(mode: str) -> None:
    """A stage has half of the layers, and so twice as many blocks."""
    settings = {"preemption_mode": mode, "kv_host_gb": 0.001}
    found = answers_of(text_checkpoint("llama"), 15, **settings, **STAGES)
    assert found.answers == alone("llama", 30, tuple(settings.items())).answers
    assert (found.moves.get("swap_out", 0) > 0) == (mode == "swap") or "load" in found.moves


@pytest.mark.slow
def test_stages_verify_ngram_drafts() -> None:
    config = {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})}
    assert compare(STAGES, "llama", 120, **config).num_draft_tokens > 0


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("llama", {"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 is more than .* 2 lay"),
        ("llama", {"speculative_config": {"method": "draft_model", "model": "gpt2"}}, "ngram or"),
        ("qwen3_5", {"speculative_config": {"method": "ngram"}}, "have states"),
    ],
)
def test_unsupported_settings_are_rejected(
    model: str, settings: dict[str, Any], message: str
) -> None:
    if "speculative_config" in settings:
        speculation = dict(settings["speculative_config"])
        if "model" in speculation:
            speculation["model"] = str(text_checkpoint(speculation["model"]))
        settings = {"speculative_config": json.dumps(speculation)}
    with pytest.raises(ConfigError, match=message):
        LLM(str(text_checkpoint(model)), **(COMMON | STAGES | settings))
