"""Properties of all towers: bits, dtypes, names of tensors, fields of configs.

Covers `models/vision/tower.py`, `models/vision/layers.py` and `models/vision/fields.py`.
"""

import copy
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.base.errors import ModelError
from quire.models.vision.attention import range_attention
from tests.support.models.vision_checkpoints import (
    CONFIGS,
    Checkpoint,
    RandomImage,
    changed,
    checkpoint,
    load_tower,
    qwen_image,
    qwen_video,
    random_image,
    spec_of,
)

FAMILIES = tuple(CONFIGS)


def images_of(family: str) -> list[RandomImage]:
    """Return images of several sizes for a family's tower."""
    if family.startswith("qwen"):
        return [qwen_image(0, 2, 14), qwen_image(1, 6, 10), qwen_video(2, 2, 4, 6),
                qwen_image(3, 8, 4), qwen_image(4, 2, 2)]  # fmt: skip
    if family == "gemma3":
        return [random_image(seed, (num, 14, 14, 3), (num,)) for seed, num in enumerate((1, 3, 2))]
    if family == "llava":
        return [random_image(seed, (1, 12, 12, 3), (4, 4)) for seed in range(3)]
    grids = [(1, 2, 4, 8), (2, 1, 8, 2), (2, 2, 6, 8), (1, 3, 2, 12)]
    return [
        random_image(seed, (1 + grid[0] * grid[1], 12, 12, 3), grid)
        for seed, grid in enumerate(grids)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_an_image_do_not_depend_on_the_batch(family: str) -> None:
    tower = checkpoint(family).tower(torch.float32)
    images = images_of(family)
    alone = [tower([image])[0] for image in images]
    order = np.random.default_rng(5).permutation(len(images)).tolist()
    assert order != sorted(order)
    together = tower([images[number] for number in order])
    for number, found in zip(order, together, strict=True):
        assert torch.equal(found, alone[number])
    assert len({tuple(found.flatten().tolist()) for found in together}) == len(images)
    assert tower([]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_is_near_the_exact_result(family: str) -> None:
    images = images_of(family)[:2]
    exact = checkpoint(family).tower()(images)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        for found, wanted in zip(checkpoint(family).tower(dtype)(images), exact, strict=True):
            assert found.dtype == dtype
            assert (found - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_additional_prefixes_of_tensor_names_are_read(family: str) -> None:
    """Older checkpoints put `model.` before all names, and `vision_model.` into the tower's."""
    found = checkpoint(family)
    prefixed = {
        "model." + name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in found.tensors.items()
        if not name.startswith(("model.", "lm_head"))
    } or found.tensors
    image = images_of(family)[0]
    tower = load_tower(family, found.config, prefixed, torch.float64)
    assert torch.equal(tower([image])[0], found.tower()([image])[0])


def test_tensors_of_a_pooling_head_are_ignored() -> None:
    changes = json.dumps({"vision_config": {"vision_use_head": True}})
    found = checkpoint("gemma3", changes)
    tower = found.tower()
    heads = [name for name in found.tensors if ".head." in name]
    assert heads
    assert all(tower.owns(name) and tower.ignores(name) for name in heads)
    assert not any(tower.owns(name) for name in found.tensors if "language_model" in name)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_vl", {"in_channels": 1}, "in_channels is 1"),
    ("qwen2_vl", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
    ("qwen2_vl", {"rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
    ("qwen2_vl", {"rope_parameters": {"factor": 2.0}}, "factor is 2.0"),
    ("qwen2_vl", {"rope_scaling": {"factor": 2.0}}, "rope_scaling is"),
    ("qwen2_vl", {"head_dim": 4}, "head_dim is 4"),
    ("qwen2_vl", {"num_heads": 3}, "num_heads is 3"),
    ("qwen2_vl", {"num_heads": 8}, "multiples of 4"),
    ("qwen2_vl", {"hidden_size": 16}, "hidden size of the text model, 24"),
    ("qwen2_vl", {"patch_size": [2, 2]}, "patch_size is"),
    ("qwen2_5_vl", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("qwen2_5_vl", {"window_size": 3}, "window_size is 3"),
    ("qwen3_vl", {"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes is"),
    ("qwen3_vl", {"deepstack_visual_indexes": [4]}, "deepstack_visual_indexes is"),
    ("gemma3", {"model_type": "clip_vision_model"}, "model_type is 'clip_vision_model'"),
    ("gemma3", {"num_channels": 4}, "num_channels is 4"),
    ("gemma3", {"patch_size": 15}, "patch_size is 15"),
    ("llava", {"model_type": "pixtral"}, "model_type is 'pixtral'"),
    ("llava", {"image_size": [12, 24]}, "image_size is"),
]
REFUSED_OUTSIDE: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {"mm_tokens_per_image": 5}, "mm_tokens_per_image is 5"),
    ("gemma3", {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9"),
    ("llava", {"vision_feature_select_strategy": "patch"}, "strategy is 'patch'"),
    ("llava", {"vision_feature_layer": 4}, "vision_feature_layer is 4"),
    ("llava", {"vision_feature_layer": []}, "vision_feature_layer is"),
    ("llava", {"vision_feature_layer": [True]}, "vision_feature_layer is"),
    ("llava", {"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'"),
    ("llava_next", {"vision_feature_select_strategy": "full", "model_type": "llava_next"},
     "strategy is 'full'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [*((family, {"vision_config": own}, text) for family, own, text in REFUSED), *REFUSED_OUTSIDE],
)
def test_unsupported_configs_are_refused_by_field(
    family: str, changes: dict[str, Any], message: str
) -> None:
    spec_of(family, CONFIGS[family])
    with pytest.raises(ModelError, match=message.replace("[", "\\[")):
        spec_of(family, changed(CONFIGS[family], changes))


def test_a_config_without_a_tower_is_refused() -> None:
    with pytest.raises(ModelError, match="vision_config is null"):
        spec_of("llava", {})


class ReadRecorder(dict[str, Any]):
    """A dictionary that records which of its keys are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, and record the key."""
        self.seen.add(key)
        return super().get(key, default)


# Fields for training, for prompts, for heads that are not part of the tower, and names of classes.
HARMLESS = {
    "attention_dropout",
    "initializer_factor",
    "initializer_range",
    "projection_dim",
    "tokens_per_second",
    "vision_use_head",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_towers_config_is_read(family: str) -> None:
    config = copy.deepcopy(checkpoint(family).config)
    tower = ReadRecorder(config["vision_config"])
    spec_of(family, config | {"vision_config": tower})
    assert tower.keys() - tower.seen - HARMLESS <= {"model_type"}


def test_attention_stays_within_its_ranges() -> None:
    random = torch.Generator().manual_seed(3)
    bounds = [0, 3, 6, 9, 10, 15, 18]
    q, k, v = torch.randn(3, 18, 2, 4, generator=random, dtype=torch.float64)
    number = torch.bucketize(torch.arange(18), torch.tensor(bounds[1:]), right=True)
    mask = torch.where(number[:, None] == number, 0.0, -torch.inf)
    weights = torch.softmax(torch.einsum("qnh,knh->nqk", q, k) * 0.3 + mask, -1)
    wanted = torch.einsum("nqk,knh->qnh", weights, v).flatten(1)
    torch.testing.assert_close(range_attention(q, k, v, bounds, 0.3).flatten(1), wanted)


def test_ranges_must_hold_all_patches() -> None:
    q = torch.zeros(4, 1, 4)
    with pytest.raises(AssertionError, match="all patches"):
        range_attention(q, q, q, [0, 3], 1.0)


def wide_checkpoint(family: str) -> Checkpoint:
    """Return a checkpoint whose layers take more memory than the rest of the tower."""
    wide = {"embed_dim" if family == "qwen2_vl" else "hidden_size": 64, "intermediate_size": 300}
    return checkpoint(family, json.dumps({"vision_config": wide}))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist, and keeps the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes == 0 or address in self._known:
            return
        self._known.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_memory_stays_within_the_towers_bound(family: str) -> None:
    tower = wide_checkpoint(family).tower()
    for image in images_of(family):
        with LiveBytes() as live, torch.inference_mode():
            found = tower.encode(image)
        bound = len(found) * tower.numbers_per_token * found.element_size()
        assert live.peak <= bound < 4 * live.peak, image.grid
        per_square = len(found) // len(image.pixels)
        assert tower.max_tokens in (None, per_square), image.grid
