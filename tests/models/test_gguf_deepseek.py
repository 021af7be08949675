"""GGUF files of architectures with latent attention, beyond test_gguf_families.py.

Covers `spec/gguf/deepseek.py` and `models/gguf/latent_heads.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.base.errors import ModelError
from quire.models.draft_model import multi_token_spec
from quire.models.load.loading import load_model
from quire.models.registry import make_model
from quire.ops.collectives.thread_group import run_ranks
from quire.spec.gguf.container import GGUFFile
from quire.spec.model_spec import ModelSpec, load_spec
from tests.support.models.checkpoints import LATENT, ROUTED, random_tokens, write_own
from tests.support.models.draft_heads import change_weights, write_mtp
from tests.support.models.gguf_facts import IN_ONE
from tests.support.models.gguf_writer import F16, F32, Q8_0, convert, model_metadata
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.ranks import logits_of

SEQUENCES = random_tokens(23, 5)
# As in V2 Lite: neither compressed queries nor groups.
LITE = (
    LATENT
    | ROUTED
    | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": True,
    }
)
V3 = LATENT | ROUTED
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 3.0],
    "original_max_position_embeddings": 128,
}
MINICPM = LATENT | {"v_head_dim": 8, "rope_parameters": LONG}
CONFIGS = {
    "lite": ("deepseek_v2", LITE),
    "in one": ("deepseek_v2", LITE | {IN_ONE: True}),
    "v3 in one": ("deepseek_v3", V3 | {IN_ONE: True}),
    "minicpm3": ("minicpm3", MINICPM),
}


def write(directory: Path, model_type: str, config: dict[str, Any]) -> ModelSpec:
    spec = write_own(directory, model_type, config).spec
    if config.get(IN_ONE):  # for the writer of GGUF files
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {IN_ONE: True}))
    return spec


def logits(path: Path, spec: ModelSpec) -> list[torch.Tensor]:
    model = load_model(path, spec, torch.float64, CPU)
    chunks = [[len(each)] for each in SEQUENCES]
    return run_paged(model, spec, SEQUENCES, chunks, backend="reference", dtype=torch.float64)


def check_equal(directory: Path, spec: ModelSpec, path: Path, limit: float = 1e-8) -> None:
    pairs = zip(logits(path, load_spec(path)), logits(directory, spec), strict=True)
    for got_TV, wanted_TV in pairs:
        torch.testing.assert_close(got_TV, wanted_TV, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", CONFIGS)
def test_other_configs_give_the_checkpoints_logits(name: str, tmp_path: Path) -> None:
    spec = write(tmp_path, *CONFIGS[name])
    path = convert(tmp_path, tmp_path / "model.gguf")
    assert ("blk.0.attn_kv_b.weight" in GGUFFile(path).tensors) == (name != "lite")
    check_equal(tmp_path, spec, path, 1e-5 if name == "minicpm3" else 1e-8)


def test_float16_files_give_the_checkpoints_logits(tmp_path: Path) -> None:
    """The weights are rounded to float16 first, so the file holds them exactly."""
    spec = write(tmp_path, "deepseek_v3", V3)
    weights = load_file(tmp_path / "model.safetensors")
    change_weights(tmp_path, {name: w.half().float() for name, w in weights.items()})
    check_equal(tmp_path, spec, convert(tmp_path, tmp_path / "model.gguf", F16))


def test_q8_0_files_give_logits_near_the_checkpoints(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    spec = write(tmp_path, "deepseek_v3", V3 | sizes)
    path = convert(tmp_path, tmp_path / "model.gguf", Q8_0)
    assert GGUFFile(path).tensors["blk.0.attn_k_b.weight"].kind.name == "Q8_0"
    model = load_model(path, load_spec(path), torch.float32, CPU)
    chunks = [[len(each)] for each in SEQUENCES]
    found = run_paged(model, load_spec(path), SEQUENCES, chunks, backend="cpu")
    for got_TV, wanted_TV in zip(found, logits(tmp_path, spec), strict=True):
        cosine = torch.cosine_similarity(got_TV.double().flatten(), wanted_TV.flatten(), dim=0)
        assert cosine > 0.99


@torch.inference_mode()
def test_two_ranks_match_one_rank(tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v3", V3)
    path = convert(tmp_path, tmp_path / "model.gguf")
    spec = load_spec(path)
    (wanted,) = run_ranks(1, lambda group: logits_of(path, spec, group))
    for found in run_ranks(2, lambda group: logits_of(path, spec, group)):
        for got_TV, wanted_TV in zip(found, wanted, strict=True):
            torch.testing.assert_close(got_TV, wanted_TV, rtol=1e-10, atol=1e-10)


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    spec = write_mtp(tmp_path, "glm4_moe").checkpoint.spec
    extra = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    path = convert(tmp_path, tmp_path / "model.gguf", F32, extra)
    assert "blk.3.nextn.eh_proj.weight" in GGUFFile(path).tensors
    assert load_spec(path).num_layers == 3
    check_equal(tmp_path, spec, path)
    with pytest.raises(ModelError, match="quire reads none of GGUF files"):
        multi_token_spec(load_spec(path), path)


def test_a_missing_gating_function_follows_from_the_bias(tmp_path: Path) -> None:
    """Only sigmoid gating has a correction bias."""
    for model_type, config in (("deepseek_v3", V3), ("deepseek_v2", LITE)):
        directory = tmp_path / model_type
        write(directory, model_type, config)
        own = model_metadata(json.loads((directory / "config.json").read_text()))
        del own["deepseek2.expert_gating_func"]
        path = convert(directory, directory / "model.gguf", metadata=own)
        assert load_spec(path).model_type == model_type


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.temperature_scale": 0.1}, "temperature_scale is 0.1.*; scores that grow"),
        ({"expert_gating_func": 3}, "expert_gating_func is 3; supported are 1 and 2"),
        ({"rope.dimension_count": 16}, "dimension_count is 16, but heads have 16 dimensions"),
        ({"attention.kv_lora_rank": 21}, r"attn_kv_a_mqa.weight has the shape \[28, 32\]"),
        ({"attention.value_length_mla": 11}, r"attn_v_b.weight has the shape \[4, 12, 22\]"),
        ({"expert_count": 7}, r"ffn_gate_exps.weight has the shape \[8, 24, 32\]"),
        ({"leading_dense_block_count": 2}, r"blk.1.ffn_up.weight is missing"),
        ({"expert_group_count": 3, "expert_group_used_count": 1}, "n_group.* must divide"),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 2.0,
            },
            "attn_factor is 2.0; deepseek2 has none",
        ),
    ],
)
def test_contradictory_metadata_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, "deepseek_v3", V3)
    extra = {f"deepseek2.{key}": value for key, value in change.items()}
    path = convert(tmp_path, tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        make_model(load_spec(path), torch.float32, torch.device("meta"))
