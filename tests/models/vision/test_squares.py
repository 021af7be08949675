"""The towers of Gemma 3, LLaVA and LLaVA-NeXT against transformers', in float64.

Covers `models/vision/siglip.py`, `models/vision/clip.py`, `models/vision/squares.py`.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ModelError
from quire.render.media.llava import LlavaNextImages
from quire.tools.verify.precision import WholePrecision
from tests.support.models.vision_checkpoints import (
    HIDDEN,
    Checkpoint,
    checkpoint,
    looked_up,
    random_image,
)

GEMMA: list[dict[str, Any]] = [
    {},
    {"mm_tokens_per_image": 1},
    {"vision_config": {"hidden_act": "gelu", "layer_norm_eps": 0.1, "patch_size": 7}},
]
LLAVA: list[dict[str, Any]] = [
    {},
    {"vision_feature_layer": [0, -1, 2, -2], "multimodal_projector_bias": False},
    {"vision_feature_layer": 1, "vision_feature_select_strategy": "full"},
    {"projector_hidden_act": "gelu_new", "vision_config": {"hidden_act": "gelu", "patch_size": 5}},
]
LLAVA_NEXT: list[dict[str, Any]] = [{}, {"vision_feature_layer": [-3, -1]}]


def squares_of(found: Checkpoint, image: Any) -> torch.Tensor:
    """Return transformers' model input, [squares, 3, H, W]."""
    return looked_up(image, 3).permute(0, 3, 1, 2)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("changes", GEMMA)
def test_gemma3_features_of_images_and_crops_match_transformers(changes: dict[str, Any]) -> None:
    found = checkpoint("gemma3", json.dumps(changes))
    images = [random_image(seed, (num, 14, 14, 3), (num,)) for seed, num in enumerate((1, 3, 2))]
    ours = found.tower()(images)
    squares = torch.cat([squares_of(found, image) for image in images])
    with torch.inference_mode(), WholePrecision():
        theirs = found.model.model.get_image_features(squares).pooler_output
    for image, got, wanted in zip(images, ours, theirs.split([1, 3, 2]), strict=True):
        tokens = found.model.config.mm_tokens_per_image
        assert got.shape == (len(image.pixels) * tokens, HIDDEN)
        close(got, wanted.flatten(0, 1))


@pytest.mark.parametrize("changes", LLAVA)
def test_llava_features_match_transformers(changes: dict[str, Any]) -> None:
    found = checkpoint("llava", json.dumps(changes))
    images = [random_image(seed, (1, 12, 12, 3), (4, 4)) for seed in range(3)]
    ours = found.tower()(images)
    squares = torch.cat([squares_of(found, image) for image in images])
    with torch.inference_mode(), WholePrecision():
        theirs = found.model.model.get_image_features(squares).pooler_output
    for got, wanted in zip(ours, theirs, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("changes", LLAVA_NEXT)
def test_llava_next_features_of_tiles_match_transformers(changes: dict[str, Any]) -> None:
    """For wide, high and square images, which the processor cuts into tiles."""
    found = checkpoint("llava_next", json.dumps(changes))
    config = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12},
              "image_grid_pinpoints": found.config["image_grid_pinpoints"]}  # fmt: skip
    processor = LlavaNextImages.from_config(config, 3, 0)
    sizes = [(12, 24), (40, 11), (13, 14), (9, 50), (31, 17), (5, 24)]
    random = np.random.default_rng(3)
    images = [processor.process(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]
    assert len({image.grid for image in images}) > 3
    ours = found.tower()(images)
    tiles = [squares_of(found, image) for image in images]
    for got, image, size, squares in zip(ours, images, sizes, tiles, strict=True):
        with torch.inference_mode(), WholePrecision():
            outputs = found.model.model.get_image_features(squares, torch.tensor([size]))
        (wanted,) = outputs.pooler_output
        assert got.shape == (image.num_tokens, HIDDEN)
        close(got, wanted)


def test_squares_of_another_size_are_refused() -> None:
    tower = checkpoint("llava").tower()
    with pytest.raises(ModelError, match="15 x 12 pixels, but the vision tower reads 12 x 12"):
        tower([random_image(0, (1, 12, 15, 3), (4, 5))])
