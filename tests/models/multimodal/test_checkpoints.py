"""Checkpoints of models that read images: names of tensors, configs, ranks, stages, quantisation.

Covers `models/multimodal/`, `models/vision/model.py`, `spec/media_families.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.formats import WeightFormats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.load.loading import LoadOptions, load_model
from quire.models.registry import MULTIMODAL, model_class, model_spec
from quire.models.vision.tower import VisionTower
from quire.ops.attention.select import make_backend
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.ops.weights.formats import Quantization
from quire.ops.weights.packed import PackedWeight
from quire.spec.media_families import FAMILIES
from quire.spec.model_spec import load_spec, text_part
from tests.support.models import quantised_writers as writers
from tests.support.models.multimodal import (
    Prompt,
    cut,
    prompt_of,
    reference_logits,
    run_prompts,
    write_multimodal,
)
from tests.support.models.paged_forward import CPU, RowPart, make_layout, make_step, run_paged
from tests.support.models.ranks import gather_logits

WEIGHTS = "model.safetensors"


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({n: value for n, value in config.items() if value is not None}))


def rename(folder: Path, *pairs: tuple[str, str]) -> None:
    """Replace the prefixes of tensor names; pairs: (old, new)."""
    tensors = load_file(folder / WEIGHTS)
    for old, new in pairs:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def check(folder: Path, family: str, reference: Any) -> None:
    """Compare the logits of a prompt with an image with transformers' logits, in float64."""
    spec = model_spec(folder)
    model = load_model(folder, spec, torch.float64, CPU)
    prompt = prompt_of(family, [1])
    (got,) = run_prompts(model, spec, [prompt], cut([prompt], 2), dtype=torch.float64)
    wanted = reference_logits(reference, family, prompt)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


LAYOUTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "new": ("qwen2_5_vl", [("model.", "model.language_model."), ("visual.", "model.visual.")]),
    "old": ("qwen3_vl", [("model.language_model.", "model."), ("model.visual.", "visual.")]),
    "new squares": (
        "llava_next",
        [
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head", "lm_head"),
            ("vision_tower.", "model.vision_tower.vision_model."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
            ("image_newline", "model.image_newline"),
        ],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_names_of_all_layouts_are_read(layout: str, tmp_path: Path) -> None:
    family, pairs = LAYOUTS[layout]
    reference = write_multimodal(tmp_path, family)
    before = set(load_file(tmp_path / WEIGHTS))
    rename(tmp_path, *pairs)
    assert len(before - set(load_file(tmp_path / WEIGHTS))) > len(pairs)
    check(tmp_path, family, reference)


@pytest.mark.parametrize("text_type", ["mistral", "qwen2"])
def test_llava_runs_with_other_text_parts(text_type: str, tmp_path: Path) -> None:
    reference = write_multimodal(tmp_path, "llava", text_type)
    check(tmp_path, "llava", reference)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "llava"])
def test_tied_heads_match_transformers(family: str, tmp_path: Path) -> None:
    reference = write_multimodal(tmp_path, family, ties=True)
    assert not any("lm_head" in name for name in load_file(tmp_path / WEIGHTS))
    check(tmp_path, family, reference)


def test_text_fields_in_the_whole_models_config_are_read(tmp_path: Path) -> None:
    """As in the authors' checkpoints, with the old name of M-RoPE."""
    reference = write_multimodal(tmp_path, "qwen2_vl", ties=True)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    rope = {"type": "mrope", "mrope_section": text["rope_parameters"]["mrope_section"]}
    flat = {name: text[name] for name in text.keys() - {"model_type", "rope_parameters"}}
    flat |= {"rope_theta": text["rope_parameters"]["rope_theta"], "rope_scaling": rope}
    edit(tmp_path, **flat | {"text_config": None})
    assert load_spec(tmp_path).tie_embeddings
    check(tmp_path, "qwen2_vl", reference)


def test_experts_with_inputs_first_are_read(tmp_path: Path) -> None:
    reference = write_multimodal(tmp_path, "qwen3_vl_moe")
    tensors = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(tmp_path / WEIGHTS).items()
    }
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    check(tmp_path, "qwen3_vl_moe", reference)


def test_short_llava_configs_have_transformers_default_sizes() -> None:
    """llava-hf writes such configs."""
    raw = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    found = text_part(raw)
    sizes = [found[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")]
    assert sizes == [4096, 32, 32]
    assert (found["intermediate_size"], found["vocab_size"]) == (11008, 32064)


def test_text_prompts_do_not_run_the_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits do not depend on the encoder memory."""
    reference = write_multimodal(tmp_path, "qwen3_vl")
    spec = model_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float64, CPU)
    monkeypatch.setattr(VisionTower, "encode", None)
    tokens, options = [3, 9, 27, 40, 11], {"dtype": torch.float64}
    (without,) = run_paged(model, spec, [tokens], [[2, 3]], **options)
    model.take_encoder_memory(3).fill_(torch.nan)
    (found,) = run_paged(model, spec, [tokens], [[2, 3]], **options)
    assert torch.equal(found, without)
    wanted = reference_logits(reference, "qwen3_vl", Prompt(tokens, [], []))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def packed_formats(model: torch.nn.Module) -> tuple[set[str], set[str]]:
    """Return the formats of packed weights in the tower and in the text part."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        weight = vars(module).get("weight")
        if isinstance(weight, PackedWeight):
            found[name.startswith("vision.")].add(weight.format)
    return found[True], found[False]


def test_quantisation_skips_the_tower(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "qwen2_5_vl")
    formats = WeightFormats(Quantization("int8", 8))
    options = LoadOptions(formats=formats)
    model = load_model(tmp_path, model_spec(tmp_path), torch.bfloat16, CPU, options)
    of_tower, of_text = packed_formats(model)
    assert of_tower == {"bfloat16"} and "int8" in of_text


@pytest.mark.parametrize("plain_prefix", ["visual.", "nothing"])
def test_the_files_decide_which_layers_are_quantised(plain_prefix: str, tmp_path: Path) -> None:
    write_multimodal(tmp_path, "qwen2_vl")
    form = writers.integers_of(8, "channel", packed=False)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / WEIGHTS).items():
        module, is_linear = name.removesuffix(".weight"), tensor.dim() == 2 and ".layers." in name
        is_linear |= ".blocks." in name and tensor.dim() == 2 and not name.startswith(plain_prefix)
        parts = form.writer(module, tensor.float())[0] if is_linear else {"weight": tensor}
        tensors |= {
            name if not is_linear else f"{module}.{end}": each.contiguous()
            for end, each in parts.items()
        }
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    edit(tmp_path, quantization_config=form.config)
    model = load_model(tmp_path, model_spec(tmp_path), torch.bfloat16, CPU)
    of_tower, of_text = packed_formats(model)
    quantised = of_text - {"bfloat16"}
    assert quantised
    assert of_tower == {"bfloat16"} | (set() if plain_prefix == "visual." else quantised)


@pytest.mark.parametrize(("num_ranks", "family"), [(3, "qwen3_vl"), (2, "llava_next")])
def test_each_rank_has_the_whole_tower(num_ranks: int, family: str, tmp_path: Path) -> None:
    text = {"num_attention_heads": 2, "num_key_value_heads": 2} if num_ranks == 2 else {}
    reference = write_multimodal(tmp_path, family, intermediate_size=24, **text)
    spec, prompt = model_spec(tmp_path), prompt_of(family, [1])
    wanted = reference_logits(reference, family, prompt)

    def logits(group: RankGroup) -> torch.Tensor:
        options = LoadOptions(place=RankPlace(group))
        model = load_model(tmp_path, spec, torch.float64, CPU, options)
        gather_logits(model, group, spec.vocab_size)
        own = spec.of_ranks(group.size)
        return run_prompts(model, own, [prompt], cut([prompt], 2), dtype=torch.float64)[0]

    for found in run_ranks(num_ranks, logits):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_each_stage_adds_the_deepstack_features_of_its_layers(tmp_path: Path) -> None:
    """With four stages, features are added in the first two (DeepStack)."""
    reference = write_multimodal(tmp_path, "qwen3_vl")
    spec, prompt = model_spec(tmp_path), prompt_of("qwen3_vl", [0])
    num, ids = spec.num_layers, torch.tensor(prompt.tokens)
    ((start, image),) = prompt.images
    x: dict[str, torch.Tensor] = {}
    for stage in range(num):
        own, place = spec.of_stage(stage, num), RankPlace(stage=stage, num_stages=num)
        model = load_model(tmp_path, own, torch.float64, CPU, LoadOptions(place=place))
        with torch.inference_mode():
            (rows,) = model.vision([image])
            model.take_encoder_memory(len(rows)).copy_(rows)
            ids[start : start + len(rows)] = -1 - torch.arange(len(rows))
            backend = make_backend("torch", make_layout(own, 9, 8, torch.float64))
            step = make_step([RowPart(0, len(ids), ([*range(9)],))], 8)
            backend.prepare(step)
            found = model(ids, prompt.positions(3), backend, **x)
            x = {"intermediate_TE": found}
    wanted = reference_logits(reference, "qwen3_vl", prompt)
    torch.testing.assert_close(model.logits(found), wanted, rtol=1e-10, atol=1e-10)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llava", {"vision_config": {"model_type": "pixtral"}}, "model_type is 'pixtral'"),
    ("llava", {"text_config": {"model_type": "gemma"}}, "text part of a llava is one of llama,"),
    ("qwen3_vl", {"text_config": {"model_type": "qwen2"}}, "text part of a qwen3_vl is one of"),
    ("qwen2_vl", {"text_config": {"rope_parameters": {"mrope_section": [1, 1]}}}, "mrope_section"),
    ("qwen2_vl", {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 1]}}}, "must be 4"),
    ("qwen3_vl", {"text_config": {"rope_parameters": {"mrope_interleaved": False}}}, "need true"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_unsupported_configs_are_refused_by_field(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_multimodal(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, **{name: config[name] | own for name, own in changes.items()})
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, load_spec(tmp_path), torch.float32, CPU)


def test_text_parts_without_a_class_are_left_to_transformers() -> None:
    """They run without images, like those of all other models."""
    raw = {"model_type": "llava", "text_config": {"model_type": "starcoder2"}}
    assert text_part(raw) == raw
    with pytest.raises(ModelError, match="one of llama, mistral, qwen2"):
        text_part(raw, has_class=True)


def test_every_family_and_its_text_parts_have_classes() -> None:
    assert MULTIMODAL.keys() == FAMILIES.keys()
    for family in FAMILIES.values():
        for text_type in family.text_types.values():
            model_class(text_type)
