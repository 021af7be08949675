"""llama.cpp's conversion of each family's checkpoints gives the same model.

Covers `spec/gguf/families.py` and `models/gguf/names.py`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ModelError
from quire.models.load.loading import load_model
from quire.models.parts import experts
from quire.models.registry import make_model
from quire.spec.model_spec import ModelSpec, load_spec
from tests.support.cases import slow_but
from tests.support.models.checkpoints import (
    DEEPSEEK_YARN,
    VARIANTS,
    Checkpoint,
    random_tokens,
    write_checkpoint,
)
from tests.support.models.gguf_writer import F32, convert, model_metadata, stored, write_gguf
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.quick import first_of_each_type

CONVERTIBLE = [
    "llama",
    "llama_tied",
    "llama_biases",
    "llama_multi_query",
    "llama3_rope",
    "linear_rope",
    "yarn_rope",
    "qwen2",
    "qwen3",
    "qwen3_tied",
    "mistral",
    "mistral_window",
    "gpt2",
    "gemma2",
    "gemma3_scaled",
    "olmo2",
    "olmo2_biases",
    "granite",
    "granite_biases",
    "smollm3",
    "cohere2",
    "phi3",
    "phi3_long",
    "phi3_short",
    "glm4",
    "glm4_plain",
    "gpt_neox",
    "qwen3_moe",
    "mixtral",
    "mixtral_window",
    "qwen2_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_wide",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_plain",
    "glm4_moe_lite_plain",
    "minicpm3_plain",
]
ONE_FACTOR = {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.3}}
# Fields that such files cannot express, with the values that llama.cpp assumes.
ASSUMED_FIELDS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen2_moe": {"norm_topk_prob": False},
    "deepseek_v2": ONE_FACTOR,
    "deepseek_v3": ONE_FACTOR,
}
# Variants that no such file can express: other biases, caps, layers without rotation or experts,
# activations. quire reads no GGUF files with chunked attention.
UNREAD = {f"llama4{kind}" for kind in ("", "_some", "_plain")}
INEXPRESSIBLE = UNREAD | {
    "deepseek_v2_lite",
    "deepseek_v3_some",
    "glm4_moe_lite",
    "minicpm3",
    "minicpm3_long",
    "opt",
    "opt_350m",
    "opt_plain",
    "gpt2_scaled",
    "qwen2_windows",
    "gemma2_plain",
    "gemma3",
    "smollm3_windows",
    "cohere2_biases",
    "gpt_neox_serial",
    "qwen3_moe_some",
    "qwen3_moe_window",
    "qwen2_moe_some",
    "gpt_oss_plain",
    "qwen3_next_some",
}
ROUNDED = ("gemma2", "gemma3_text")  # files hold their norm weights plus 1, in float32
SEQUENCES = random_tokens(23, 5, 61, 1)
WHOLE = [[23], [5], [61], [1]]
# Fields of the spec that a GGUF file lacks or states differently.
LOOSE = {"model_type", "dtype", "raw", "bos_token_id", "eos_token_ids"}


def convertible(folder: Path, variant: str) -> Checkpoint:
    checkpoint = write_checkpoint(folder, variant)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | ASSUMED_FIELDS.get(variant, {})
    path.write_text(json.dumps(config))
    return replace(checkpoint, spec=load_spec(folder))


@pytest.fixture(
    scope="module", params=slow_but(CONVERTIBLE, *first_of_each_type(), "llama_tied", "phi3_long")
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return convertible(tmp_path_factory.mktemp(request.param), request.param)


def logits(model: torch.nn.Module, spec: ModelSpec, dtype: torch.dtype) -> list[torch.Tensor]:
    return run_paged(model, spec, SEQUENCES, WHOLE, backend="reference", dtype=dtype)


def has_divisors(spec: ModelSpec) -> bool:
    rope = spec.raw.get("rope_parameters", {})
    return "divisors" in rope or "long_factor" in rope


def test_each_variant_is_convertible_or_listed_as_inexpressible() -> None:
    assert {name for name in VARIANTS if name not in CONVERTIBLE} == INEXPRESSIBLE


def test_a_converted_file_has_the_same_spec(checkpoint: Checkpoint, tmp_path: Path) -> None:
    spec = load_spec(convert(checkpoint.directory, tmp_path / "model.gguf"))
    for name in vars(spec).keys() - LOOSE:
        assert getattr(spec, name) == getattr(checkpoint.spec, name), name
    assert spec.dtype == "float32"


def test_float32_files_give_the_same_logits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Computes in float64, which holds the numbers of the file exactly."""
    path = convert(checkpoint.directory, tmp_path / "model.gguf")
    spec = load_spec(path)
    wanted = load_model(checkpoint.directory, checkpoint.spec, torch.float64, CPU)
    got = load_model(path, spec, torch.float64, CPU)
    pairs = zip(
        logits(got, spec, torch.float64),
        logits(wanted, checkpoint.spec, torch.float64),
        strict=True,
    )
    # The file holds the epsilon of norms in float32.
    limit = 1e-5 if spec.raw.get("model_type") in ROUNDED or has_divisors(spec) else 1e-8
    limit = 1e-4 if spec.linear_layers else limit  # the inputs of decays are rounded, too
    for got_TV, wanted_TV in pairs:
        torch.testing.assert_close(got_TV, wanted_TV, rtol=limit, atol=limit)


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_stacked_experts_give_the_same_logits(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = convertible(tmp_path, variant)
    path = convert(tmp_path, tmp_path / "model.gguf")
    monkeypatch.setattr(experts, "experts_class", lambda device: experts.StackedExperts)
    one, other = (
        logits(load_model(source, spec, torch.float64, CPU), spec, torch.float64)
        for source, spec in ((tmp_path, checkpoint.spec), (path, load_spec(path)))
    )
    for got_TV, wanted_TV in zip(other, one, strict=True):
        torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma2", {"attention.sliding_window_pattern": [True]}, "an array of 1 for 4 layers"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; it must be"),
        ("gemma2", {"logit_scale": 2.0}, "logit_scale is 2.0, which quire does not support"),
        ("gemma3_scaled", {"attn_logit_softcapping": 5.0}, "softcapping is 5.0, which quire"),
        ("olmo2", {"attention.sliding_window": 8}, "sliding_window is 8; models of olmo2 have no"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned is false; granite has a rotary"),
        ("phi3", {"rope.dimension_count": 10}, "dimension_count is 10, but heads have 8 dimens"),
        ("glm4", {"rope.dimension_sections": [2, 1, 1, 0]}, "of a model that reads images"),
        ("glm4", {"expert_count": 2}, "expert_count is 2; such a mixture of experts is not supp"),
        ("qwen3_moe", {"expert_count": 7}, r"ffn_gate_exps.weight has the shape \[6, 24, 32\]"),
    ],
)
def test_metadata_that_a_family_ignores_is_refused(
    tmp_path: Path, variant: str, change: dict[str, Any], message: str
) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    own = model_metadata({"model_type": checkpoint.spec.model_type} | checkpoint.spec.raw)
    prefix = own["general.architecture"]
    extra = {f"{prefix}.{key}": value for key, value in change.items()}
    path = convert(checkpoint.directory, tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        make_model(load_spec(path), torch.float32, torch.device("meta"))


@pytest.mark.parametrize("present", ["long", "short"])
def test_phi3_with_one_set_of_rope_factors_is_refused(present: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "phi3")
    metadata = model_metadata({"model_type": "phi3"} | checkpoint.spec.raw)
    tensors = {
        "token_embd.weight": stored(np.ones((97, 32)), F32),
        f"rope_factors_{present}.weight": stored(np.ones(4), F32),
    }
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(ModelError, match="has one of rope_factors_long.weight and rope_factors_sh"):
        load_spec(path)
