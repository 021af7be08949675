"""The text part of a checkpoint that also reads images gives transformers' logits.

Covers `spec/model_spec.py` and `models/families/llama4.py`.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.models.load.loading import load_model
from quire.models.registry import model_spec
from quire.spec.model_spec import TIES, load_spec
from tests.support.models.checkpoints import (
    GEMMA3,
    HYBRID,
    HYBRID_EXPERTS,
    LLAMA4,
    exact_logits,
    random_tokens,
)
from tests.support.models.paged_forward import CPU, run_paged

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE = {"mm_tokens_per_image": 4, "image_token_index": 96}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
QWEN_TOKENS = {
    f"{name}_token_id": 90 + i
    for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
TOKENS = random_tokens(40)
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    text = GEMMA3 | {"initializer_range": 0.25}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, **IMAGE)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_qwen3_5_matches_transformers(
    kind: str, ties: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint also has a convolution and layers for multi-token prediction."""
    own = HYBRID_EXPERTS if kind.endswith("Moe") else HYBRID
    text = own | {"initializer_range": 0.25, TIES: ties, "rms_norm_eps": 1e-3}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=QWEN_VISION, tie_word_embeddings=ties, **QWEN_TOKENS
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    wanted = exact_logits(tmp_path, TOKENS)[0]
    tensors = load_file(tmp_path / WEIGHTS) | {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    edit(tmp_path, tie_word_embeddings=None)  # the text part's config has it, too
    spec = model_spec(tmp_path)
    assert spec.tie_embeddings == ties and spec.linear_layers
    with caplog.at_level(logging.WARNING, "quire"):
        model = load_model(tmp_path, spec, torch.float64, CPU)
    assert caplog.messages[-1].endswith("only the text part is served, without images")
    options: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, TOKENS, [[7, 33]], **options)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_the_text_part_of_llama4_matches_transformers(tmp_path: Path) -> None:
    """quire refuses its images, and serves the text part."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 16,
        "num_attention_heads": 2, "patch_size": 8, "vision_output_dim": 16,
        "projector_input_dim": 16, "projector_output_dim": 16,
    }  # fmt: skip
    text = LLAMA4 | {"initializer_range": 0.25}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    transformers.Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    wanted = exact_logits(tmp_path, TOKENS)[0]
    spec = model_spec(tmp_path)
    assert [group.kind for group in spec.cache_groups] == ["full", "chunked"]
    model = load_model(tmp_path, spec, torch.float64, CPU)
    options: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, TOKENS, [[7, 33]], **options)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("old", "new"), [("", ""), ("language_model.model.", "model.language_model.")]
)
def test_the_text_part_of_gemma3_matches_transformers(folder: Path, old: str, new: str) -> None:
    """The model reads images; the prompts have none."""
    wanted = exact_logits(folder, TOKENS)[0]
    assert wanted.std() > 0.3
    rename(folder, old, new)
    spec = model_spec(folder)
    assert (spec.model_type, spec.tie_embeddings, spec.eos_token_ids) == ("gemma3_text", True, (2,))
    model = load_model(folder, spec, torch.float64, CPU)
    options: dict[str, Any] = {"backend": "reference", "dtype": torch.float64}
    got = run_paged(model, spec, TOKENS, [[7, 33]], **options)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_the_whole_models_config_overrides_its_text_part(folder: Path) -> None:
    edit(folder, eos_token_id=[3, 4], torch_dtype="bfloat16", dtype=None)
    spec = load_spec(folder)
    assert (spec.eos_token_ids, spec.dtype) == ((3, 4), "bfloat16")


def test_unknown_tensors_are_still_refused(folder: Path) -> None:
    rename(folder, "vision_tower.", "audio_tower.")
    with pytest.raises(ModelError, match="hold unknown tensors .audio_tower"):
        load_model(folder, load_spec(folder), torch.float32, CPU)


def test_a_stored_head_that_differs_from_the_tied_one_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    head = tensors["language_model.model.embed_tokens.weight"] + 1
    tensors["language_model.lm_head.weight"] = head
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="ties the head to the embedding"):
        load_model(folder, load_spec(folder), torch.float32, CPU)


def test_another_text_part_is_refused(folder: Path) -> None:
    edit(folder, text_config={"model_type": "llama"})
    with pytest.raises(ModelError, match="model_type is 'llama'; the text part of a gemma3 is"):
        load_spec(folder)
