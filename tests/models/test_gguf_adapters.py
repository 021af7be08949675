"""Adapters in llama.cpp's GGUF files equal those in PEFT's files, for bases of both formats.

Covers `models/gguf/adapters.py` and `spec/gguf/adapter.py`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.base.errors import ModelError
from quire.base.settings.lora import LoraConfig
from quire.models.checkpoint.adapter_files import adapter_digest, read_adapter
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from quire.models.load.adapters import AdaptedModel
from quire.models.load.loading import load_model
from quire.spec.gguf.families import FAMILIES
from quire.spec.model_spec import load_spec
from quire.tools.verify.paged import CPU, Paging, run_paged
from tests.support.models.checkpoints import VARIANTS, Checkpoint, random_tokens, write_checkpoint
from tests.support.models.gguf_facts import ARCHITECTURES
from tests.support.models.gguf_writer import F16, Q8_0, convert, write_gguf
from tests.support.models.quick import first_of_each_type
from tests.support.runner.adapters import Shape, merge, to_gguf, write_adapter

MAX_RANK = 256
QUERY = "model.layers.0.self_attn.q_proj"
# Files of these types hold some modules in parts.
SPLIT = ("qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")
KNOWN = (*FAMILIES, "gpt2", "minicpm3")
TYPES = [
    name
    for name, (kind, _) in VARIANTS.items()
    if name in first_of_each_type() and ARCHITECTURES.get(kind, kind) in KNOWN and kind not in SPLIT
]


def adapted_model(made: Checkpoint) -> AdaptedModel:
    model = load_model(made.directory, made.spec, torch.float64, CPU)
    return AdaptedModel(model, made.spec, LoraConfig(max_loras=1), torch.float64)


def write_both(made: Checkpoint, adapted: AdaptedModel, folder: Path) -> tuple[Path, Path]:
    """Write an adapter of all modules but experts, in PEFT's format and in llama.cpp's."""
    stored = safetensors_shapes(weight_files(made.directory))
    places = adapted.places.items()
    modules = {
        name: place.shape
        for name, place in places
        if f"{name}.weight" in stored and ".experts." not in name
    }
    assert modules, "nothing would be tested"
    peft = write_adapter(folder / "peft", modules, 4)
    return peft, to_gguf(peft, folder / "lora.gguf", config_of(made))


def config_of(made: Checkpoint) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((made.directory / "config.json").read_text())
    return config


@pytest.mark.parametrize("variant", TYPES)
def test_gguf_adapters_have_the_matrices_of_pefts_files(variant: str, tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", variant)
    adapted = adapted_model(made)
    wanted, found = (
        adapted.load(str(each), MAX_RANK) for each in write_both(made, adapted, tmp_path)
    )
    assert wanted.parts.keys() == found.parts.keys()
    for layer, parts in wanted.parts.items():
        others = {part.first: part for part in found.parts[layer]}
        assert len(others) == len(parts)
        for part in parts:
            other = others[part.first]
            assert torch.equal(part.down_RK, other.down_RK)
            assert torch.equal(part.up_RN, other.up_RN)
            assert part.scale == other.scale


def test_a_gguf_base_with_an_adapter_matches_the_merged_model(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    peft, gguf = write_both(made, adapted_model(made), tmp_path)
    merge(made.directory, peft, tmp_path / "merged")
    base = convert(made.directory, tmp_path / "base.gguf")
    spec, tokens, paging = load_spec(base), random_tokens(12), Paging(dtype=torch.float64)
    model = load_model(base, spec, torch.float64, CPU)
    adapted = AdaptedModel(model, spec, LoraConfig(max_loras=1), torch.float64)
    adapted.slots.put(0, adapted.load(str(gguf), MAX_RANK))
    adapted.slots.begin_step([(0, range(12))])
    [found] = run_paged(model, spec, tokens, [[12]], paging)
    merged = load_model(tmp_path / "merged", made.spec, torch.float64, CPU)
    [wanted] = run_paged(merged, made.spec, tokens, [[12]], paging)
    assert (found - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize(("kind", "error"), [(F16, 1e-3), (Q8_0, 1e-2)])
def test_f16_and_q8_0_adapters_are_dequantised(tmp_path: Path, kind: int, error: float) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    adapted = adapted_model(made)
    peft = write_adapter(tmp_path / "peft", {QUERY: adapted.places[QUERY].shape}, 4)
    gguf = to_gguf(peft, tmp_path / "lora.gguf", config_of(made), kind)
    [[wanted]] = adapted.load(str(peft), MAX_RANK).parts.values()
    [[found]] = adapted.load(str(gguf), MAX_RANK).parts.values()
    assert 0 < (found.down_RK - wanted.down_RK).abs().max() < error


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 2.0), (0.0, 1.0)])
def test_gguf_adapters_have_scale_digest_and_bounded_rank(
    tmp_path: Path, alpha: float, scale: float
) -> None:
    """llama.cpp treats alpha 0 as the scale 1."""
    peft = write_adapter(tmp_path / "peft", {QUERY: (32, 32)}, 4, alpha=alpha)
    gguf = to_gguf(peft, tmp_path / "lora.gguf", {"model_type": "qwen2"})
    files = read_adapter(gguf)
    assert [(each.rank, each.scale) for each in files.modules] == [(4, scale)]
    before = adapter_digest(gguf)
    gguf.write_bytes(gguf.read_bytes() + b"1")
    assert adapter_digest(gguf) != before
    with pytest.raises(ModelError, match="rank 4, above max_lora_rank=3"):
        read_adapter(gguf, 3)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "no adapter"),
        ({"adapter.type": "control_vector"}, "no adapter"),
        ({"adapter.lora.alpha": float("nan")}, "must be a number"),
        ({"adapter.lora.alpha": "8"}, "must be a number"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "all tokens"),
        ({}, "changes nothing"),
    ],
)
def test_gguf_files_without_a_valid_adapter_are_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    usual = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    path = write_gguf(tmp_path / "lora.gguf", usual | metadata)
    with pytest.raises(ModelError, match=message):
        read_adapter(path)


def test_foreign_and_damaged_adapters_are_refused(tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "base", "llama")
    adapted, other = adapted_model(made), {"model_type": "qwen2"}
    shapes: dict[str, Shape] = {QUERY: (32, 32)}
    path = to_gguf(write_adapter(tmp_path / "a", shapes), tmp_path / "a.gguf", other)
    with pytest.raises(ModelError, match="architecture 'qwen2'"):
        adapted.load(str(path), MAX_RANK)
    head = to_gguf(
        write_adapter(tmp_path / "b", {"lm_head": (96, 32)}), tmp_path / "b.gguf", config_of(made)
    )
    with pytest.raises(ModelError, match="no linear layer"):
        adapted.load(str(head), MAX_RANK)
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="not a valid GGUF file"):
        read_adapter(tmp_path / "c.gguf")
    (tmp_path / "d.bin").write_bytes(b"text")
    with pytest.raises(ModelError, match="neither a directory"):
        read_adapter(tmp_path / "d.bin")
