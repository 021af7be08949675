"""The towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers', in float64.

Covers `models/vision/qwen2_vl.py`, `models/vision/qwen2_5_vl.py`, `models/vision/qwen3_vl.py`.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from quire.models.vision.qwen2_5_vl import window_order
from quire.models.vision.qwen3_vl import interpolated_positions
from quire.tools.verify.precision import WholePrecision
from tests.support.models.vision_checkpoints import (
    HIDDEN,
    Checkpoint,
    checkpoint,
    looked_up,
    qwen_image,
    qwen_video,
)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
# One row of tokens, one column, one token, and grids that windows and the table do not divide.
IMAGES = [
    qwen_image(0, 2, 14),
    qwen_image(1, 10, 2),
    qwen_image(2, 2, 2),
    qwen_image(3, 6, 10),
    qwen_image(4, 8, 12),
    qwen_video(5, 3, 6, 4),
]
# Families with values of their configs that transformers computes differently.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen2_vl", {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 50.0}}),
    ("qwen2_5_vl", {"window_size": 13, "fullatt_block_indexes": [0, 2], "hidden_act": "gelu"}),
    ("qwen2_5_vl",
     {"spatial_merge_size": 1, "temporal_patch_size": 1, "fullatt_block_indexes": []}),
    ("qwen3_vl", {"num_position_embeddings": 5, "deepstack_visual_indexes": []}),
    ("qwen3_vl", {"hidden_act": "quick_gelu", "num_heads": 4, "intermediate_size": 5}),
]  # fmt: skip


def reference(found: Checkpoint, images: list[Any]) -> list[torch.Tensor]:
    """Return transformers' features of all images, computed in one call."""
    frames = found.model.config.vision_config.temporal_patch_size
    values = []
    for image in images:
        value = looked_up(image, 1)
        if value.dim() == 4:
            value = value[:, :, None].expand(-1, -1, frames, -1, -1)
        values.append(value.flatten(1))
    grids = torch.tensor([image.grid for image in images])
    with torch.inference_mode(), WholePrecision():
        outputs = found.model.model.get_image_features(torch.cat(values), grids)
    parts = [outputs.pooler_output, *getattr(outputs, "deepstack_features", [])]
    return [torch.cat(each, 1) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_towers_match_transformers(family: str, changes: dict[str, Any]) -> None:
    found = checkpoint(family, json.dumps({"vision_config": changes}))
    tower = found.tower()
    is_single = changes.get("temporal_patch_size") == 1
    images = IMAGES[:-1] if is_single else IMAGES
    ours, theirs = tower(images), reference(found, images)
    for image, got, wanted in zip(images, ours, theirs, strict=True):
        group = found.model.config.vision_config.spatial_merge_size**2
        assert got.shape == (np.prod(image.grid) // group, tower.width)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_deepstack_features_follow_the_embeddings() -> None:
    tower = checkpoint("qwen3_vl").tower()
    assert tower.width == 3 * HIDDEN
    assert checkpoint("qwen3_vl_moe").tower().width == 4 * HIDDEN


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_windows_match_transformers(merge: int, groups: int) -> None:
    random = np.random.default_rng(merge + 10 * groups)
    for frames, rows, columns in random.integers(1, 8, (12, 3)).tolist():
        grid = (frames, rows * merge, columns * merge)
        order, bounds = window_order(grid, merge, groups)
        wanted, lengths = get_vision_window_index(
            torch.tensor([grid]), merge, groups * merge * 4, 4
        )
        assert order.tolist() == wanted.tolist()
        assert bounds == lengths.tolist()


def test_positions_at_the_corners_are_those_of_the_table() -> None:
    entries, weights = interpolated_positions((1, 4, 6), 2, 5)
    np.testing.assert_allclose(weights.sum(1), 1.0)
    nearest = entries[np.arange(24), weights.argmax(1)]
    assert [nearest[index] for index in (0, 9, 14, 23)] == [0, 4, 20, 24]
