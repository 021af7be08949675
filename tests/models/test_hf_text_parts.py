"""Text parts of models that read images, by transformers' classes: the whole model's logits.

Covers `models/hf/configs.py`, `models/hf/spec.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as WHOLES

from quire.base.errors import ModelError
from quire.models.load.loading import LoadOptions, load_model
from quire.models.registry import model_spec
from quire.spec.model_spec import TRANSFORMERS
from tests.support.cases import slow_but
from tests.support.models.checkpoints import random_tokens
from tests.support.models.paged_forward import CPU, run_paged
from tests.support.models.transformers_checkpoints import SMALL, use_exact_attention

SEQUENCES = random_tokens(17, 5)
CHUNKS = [[7, 0, 9, 1], [0, 3, 1, 1]]
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "embed_dim": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8, "image_size": 16,
    "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
EXPERTS = {
    "num_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MROPE = SMALL | {"rope_parameters": ROPE}
PARTIAL = SMALL | {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
IMAGES = {"image_token_id": 90, "image_seq_length": 4}
# type of the whole model -> configs of its text part and its vision part
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (MROPE, VISION),
    "qwen2_5_vl": (MROPE, VISION),
    "qwen3_vl": (MROPE, VISION),
    "qwen3_vl_moe": (MROPE | EXPERTS, VISION),
    "glm4v": (PARTIAL, VISION),
    "glm4v_moe": (PARTIAL | EXPERTS, VISION),
    "glm46v": (PARTIAL | {"model_type": "glm4v_text"}, VISION | {"model_type": "glm4v_vision"}),
    "glm_ocr": (PARTIAL, VISION),
}
TEXT_TYPES = {"internvl": "qwen2", "mistral3": "mistral"}


def write(folder: Path, model_type: str, ties: bool) -> None:
    """Write a whole model with weights large enough that every part matters."""
    torch.manual_seed(0)
    text, vision = PARTS.get(model_type, (None, None))
    config: dict[str, Any] = {"tie_word_embeddings": ties}
    if text is None:
        config["text_config"] = SMALL | {"model_type": TEXT_TYPES[model_type]}
        config["vision_config"] = {name: VISION[name] for name in VISION if name != "image_size"}
        config["vision_config"] |= {"image_size": [16, 16]} if model_type == "internvl" else {}
        config["vision_config"] |= {"patch_size": [8, 8]} if model_type == "internvl" else {}
    else:
        config |= {"text_config": text, "vision_config": vision}
    made = transformers.CONFIG_MAPPING[model_type](**config)
    whole = WHOLES[type(made)](made)
    for name, parameter in whole.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.25)
    whole.save_pretrained(folder)


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({n: value for n, value in config.items() if value is not None}))


def check(folder: Path, tolerance: float = 1e-10) -> None:
    """Check that the text part's logits equal those of the whole model, in float64."""
    spec = model_spec(folder, TRANSFORMERS)
    model = load_model(folder, spec, torch.float64, CPU)
    run: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, SEQUENCES, CHUNKS, **run)
    whole = WHOLES[transformers.CONFIG_MAPPING[spec.raw["model_type"]]].from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation=use_exact_attention(),
        experts_implementation="eager",
    )
    for tokens, logits_TV in zip(SEQUENCES, got, strict=True):
        with torch.inference_mode():
            wanted_TV = whole.eval()(torch.tensor([tokens])).logits[0]
        assert wanted_TV.std() > 0.2, "logits vary too little to compare"
        torch.testing.assert_close(logits_TV, wanted_TV, rtol=tolerance, atol=tolerance)


# Slow: what the next test covers with an untied head, and parts that differ only in names.
@pytest.mark.parametrize("model_type", slow_but(PARTS, "glm4v_moe", "qwen2_5_vl"))
def test_the_text_part_matches_the_whole_model(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, model_type, ties=False)
    # glm4v_moe's routers compute in float32, with sums that depend on the size of a step.
    check(tmp_path, 1e-6 if model_type == "glm4v_moe" else 1e-10)


@pytest.mark.parametrize(
    ("model_type", "ties"),
    [
        ("internvl", True),
        ("mistral3", False),
        pytest.param("qwen2_vl", False, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", True, marks=pytest.mark.slow),
        pytest.param("internvl", False, marks=pytest.mark.slow),
        pytest.param("mistral3", True, marks=pytest.mark.slow),
        pytest.param("qwen2_vl", True, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", False, marks=pytest.mark.slow),
    ],
)
def test_the_whole_models_config_decides_whether_the_head_is_tied(
    model_type: str, ties: bool, tmp_path: Path
) -> None:
    write(tmp_path, model_type, ties)
    assert model_spec(tmp_path, TRANSFORMERS).tie_embeddings == ties
    check(tmp_path)


@pytest.mark.parametrize("ties", [True, False])
def test_the_stored_head_decides_tying_if_no_config_does(ties: bool, tmp_path: Path) -> None:
    """Mistral3's class ties by default, and old checkpoints lack the field."""
    write(tmp_path, "mistral3", ties)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text.pop("tie_word_embeddings", None)
    edit(tmp_path, tie_word_embeddings=None, text_config=text)
    assert model_spec(tmp_path, TRANSFORMERS).tie_embeddings == ties
    check(tmp_path)


def test_transposed_experts_are_read(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl_moe", ties=False)
    path = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    check(tmp_path)


def test_text_fields_in_the_whole_models_config_are_read(tmp_path: Path) -> None:
    """As in the checkpoints of Qwen2-VL."""
    write(tmp_path, "qwen2_vl", ties=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    flat = {name: value for name, value in text.items() if name != "model_type"}
    edit(tmp_path, **flat | {"text_config": None, "rope_parameters": None, "rope_scaling": rope})
    check(tmp_path)


def test_text_parts_without_a_class_are_refused_by_name(tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING["mllama"]().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="text-generation class for 'mllama_text_model'; .*qwen2_vl_text"
    ):
        model_spec(tmp_path, TRANSFORMERS)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    write(tmp_path, "mistral3", ties=False)
    edit(tmp_path, tie_word_embeddings=None)
    (tmp_path / "model.safetensors").unlink()
    spec = model_spec(tmp_path, TRANSFORMERS)
    load_model(tmp_path, spec, torch.float32, CPU, LoadOptions("dummy"))
    assert not spec.tie_embeddings


@pytest.mark.parametrize(
    "model_type", slow_but(["qwen2_vl", "qwen3_vl", "glm4v"], "qwen3_vl", "glm4v")
)
def test_text_parts_without_experts_run_as_quires_operations(
    model_type: str, tmp_path: Path
) -> None:
    """Also where the rotary embedding overwrites angles, as in Qwen3-VL."""
    write(tmp_path, model_type, ties=False)
    spec = model_spec(tmp_path, TRANSFORMERS)
    model, exact = (load_model(tmp_path, spec, t, CPU) for t in (torch.float32, torch.float64))
    assert model.only_operations, model.runs_by
    reference: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, SEQUENCES, CHUNKS, backend="cpu")
    wanted = run_paged(exact, spec, SEQUENCES, CHUNKS, **reference)
    for logits_TV, wanted_TV in zip(got, wanted, strict=True):
        torch.testing.assert_close(logits_TV, wanted_TV.float(), rtol=2e-4, atol=2e-4)
