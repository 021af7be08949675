"""Tiny checkpoints with vision towers, written by transformers, and their towers here."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import safe_open

from quire.models.checkpoint.formats import AS_THEY_ARE
from quire.models.load.assembly import Assembly, EmptyParamFactory
from quire.models.model import Model
from quire.models.vision.clip import LlavaNextTower, LlavaTower, LlavaVisionSpec
from quire.models.vision.qwen2_5_vl import Qwen25VLTower, Qwen25VLVisionSpec
from quire.models.vision.qwen2_vl import Qwen2VLTower, Qwen2VLVisionSpec
from quire.models.vision.qwen3_vl import Qwen3VLTower, Qwen3VLVisionSpec
from quire.models.vision.siglip import Gemma3Tower, Gemma3VisionSpec
from quire.models.vision.tower import VisionTower
from quire.spec.config_fields import Fields
from quire.tools.verify.precision import WholePrecision

HIDDEN = 24  # of the text models
TEXT = {
    "vocab_size": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN2 = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": 2,
    "mlp_ratio": 2,
}
QWEN25 = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 20,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": 2,
    "window_size": 8,
    "fullatt_block_indexes": [1],
}
QWEN3 = {
    "depth": 4,
    "hidden_size": 16,
    "intermediate_size": 20,
    "out_hidden_size": HIDDEN,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
SQUARE = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2, "patch_size": 3}
SIGLIP = SQUARE | {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "image_size": 14}
CLIP = SQUARE | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 12}

SPECS: dict[str, Any] = {
    "qwen2_vl": (Qwen2VLVisionSpec, Qwen2VLTower),
    "qwen2_5_vl": (Qwen25VLVisionSpec, Qwen25VLTower),
    "qwen3_vl": (Qwen3VLVisionSpec, Qwen3VLTower),
    "qwen3_vl_moe": (Qwen3VLVisionSpec, Qwen3VLTower),
    "gemma3": (Gemma3VisionSpec, Gemma3Tower),
    "llava": (LlavaVisionSpec, LlavaTower),
    "llava_next": (LlavaVisionSpec, LlavaNextTower),
}
MODELS = {
    "qwen2_vl": transformers.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": transformers.Qwen3VLMoeForConditionalGeneration,
    "gemma3": transformers.Gemma3ForConditionalGeneration,
    "llava": transformers.LlavaForConditionalGeneration,
    "llava_next": transformers.LlavaNextForConditionalGeneration,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": QWEN2},
    "qwen2_5_vl": {"vision_config": QWEN25},
    "qwen3_vl": {"vision_config": QWEN3},
    "qwen3_vl_moe": {"vision_config": QWEN3 | {"deepstack_visual_indexes": [2, 0, 3]}},
    "gemma3": {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "llava": {"vision_config": CLIP},
    "llava_next": {
        "vision_config": CLIP,
        "image_grid_pinpoints": [[12, 24], [24, 12], [24, 24], [12, 36], [36, 12]],
    },
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in float64 and transformers' model of it, loaded from the files."""

    family: str
    config: dict[str, Any]  # of config.json
    tensors: Mapping[str, torch.Tensor]  # of the files, by the names there
    model: Any = field(repr=False)

    def tower(self, dtype: torch.dtype = torch.float64) -> VisionTower:
        """Return the tower here, with the tensors of the files."""
        return load_tower(self.family, self.config, self.tensors, dtype)


def checkpoint(family: str, changes: str = "{}") -> Checkpoint:
    """Return a family's checkpoint. changes: JSON, merged into its config and vision_config."""
    return _checkpoint(family, changes)


@functools.cache
def _checkpoint(family: str, changes: str) -> Checkpoint:
    torch.manual_seed(7)
    config = changed(CONFIGS[family], json.loads(changes))
    text = TEXT | (EXPERTS if family == "qwen3_vl_moe" else {})
    text |= {"model_type": "llama"} if family.startswith("llava") else {}
    kind = MODELS[family]
    with TemporaryDirectory() as folder, WholePrecision():
        model = kind(kind.config_class(text_config=text, **config)).double()
        for parameter in model.parameters():
            scale = 0.1 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.data.normal_(0.0, scale).add_(parameter.dim() == 1)
        model.save_pretrained(folder)
        found = kind.from_pretrained(folder, dtype=torch.float64).eval()
        written = json.loads(Path(folder, "config.json").read_text("utf-8"))
        with safe_open(Path(folder, "model.safetensors"), "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return Checkpoint(family, written, tensors, found)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config with other values; those in `vision_config` are merged."""
    merged = {**config, **changes}
    merged["vision_config"] = {**config["vision_config"], **changes.get("vision_config", {})}
    return merged


def spec_of(family: str, config: dict[str, Any]) -> Any:
    """Return the spec of a family's tower."""
    return SPECS[family][0].from_config(Fields(config), HIDDEN)


def load_tower(
    family: str, config: dict[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> VisionTower:
    """Load a tower as models are loaded: layer by layer, and packed where the CPU packs.

    Fails if a tensor of the tower is missing, or is neither used nor known to be of no use.
    """
    cpu = torch.device("cpu")
    tower: VisionTower = SPECS[family][1](spec_of(family, config), EmptyParamFactory(dtype, cpu))
    assembly = Assembly(cast(Model, tower.eval()), cpu, AS_THEY_ARE)
    for name, tensor in tensors.items():
        if tower.owns(name):
            names = tower.names_of(name)
            is_used = any(
                assembly.fill(each, functools.partial(_fill, tensor=tensor)) for each in names
            )
            assert is_used != tower.ignores(name), name
    assert assembly.missing == []
    assembly.finish()
    return tower


def _fill(source: Any, tensor: torch.Tensor) -> None:
    assert source.fits(tuple(tensor.shape)), source.name
    source.fill(tensor)


@dataclass(frozen=True)
class RandomImage:
    """A `ProcessedImage` with random pixels and a random table."""

    pixels: npt.NDArray[np.uint8]
    table: npt.NDArray[np.float32]
    grid: tuple[int, ...]


def random_image(seed: int, shape: tuple[int, ...], grid: tuple[int, ...]) -> RandomImage:
    """Return an image of this shape. grid: as the family's tower reads it."""
    random = np.random.default_rng(seed)
    table = random.normal(size=(3, 256)).astype(np.float32)
    return RandomImage(random.integers(0, 256, shape, np.uint8), table, grid)


def qwen_image(seed: int, rows: int, columns: int, patch: int = 2) -> RandomImage:
    """Return an image of the Qwen families with so many patches."""
    return random_image(seed, (rows * columns, 3, patch, patch), (1, rows, columns))


def qwen_video(seed: int, frames: int, rows: int, columns: int, patch: int = 2) -> RandomImage:
    """Return a video of the Qwen families with two different pictures in each patch."""
    shape = (frames * rows * columns, 3, 2, patch, patch)
    return random_image(seed, shape, (frames, rows, columns))


def looked_up(image: Any, channel_axis: int) -> torch.Tensor:
    """Return the model input for an image, float64."""
    last = np.moveaxis(image.pixels, channel_axis, -1)
    values = np.stack([image.table[channel][last[..., channel]] for channel in range(3)], -1)
    return torch.tensor(np.moveaxis(values, -1, channel_axis), dtype=torch.float64)
