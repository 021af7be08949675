"""The vision tower of Qwen2.5-VL (arXiv 2502.13923): RMS norms, gated feed-forward layers, and
windows. Most blocks attend within windows of the frame, some within the whole frame.

Groups of patches are sorted by window before the blocks, and restored to their order after the
merger. Windows at the right and lower edges are smaller if windows do not divide the frame.

Shape legend: T patches, G groups of patches, D tower width, W output width.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from quire.models.parts.layers import ParamFactory, RMSNorm
from quire.models.vision.attention import BlockAttention, Int64
from quire.models.vision.fields import VISION_GATES, vision_fields
from quire.models.vision.qwen_vl import (
    NORM_EPS,
    Grid,
    PatchMerger,
    QwenTower,
    QwenVisionSpec,
    frame_bounds,
    grid_of,
    merge_order_positions,
    read_common,
)
from quire.models.vision.tower import ImageArrays
from quire.spec.config_fields import Fields

FRAMES, WINDOWS = range(2)  # the cuts of an image's patches
DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


@dataclass(frozen=True)
class Qwen25VLVisionSpec(QwenVisionSpec):
    """The sizes of the tower."""

    window_groups: int = 4  # groups of patches on each side of a window
    full_blocks: frozenset[int] = frozenset()  # blocks that attend within the whole frame

    @classmethod
    def from_config(cls, config: Fields, hidden_size: int) -> Self:
        """Return the spec that `config.json` describes. Raises ModelError for an unsupported field.

        hidden_size: width of the text model."""
        fields = vision_fields(config, DEFAULTS)
        inner = fields.integer("intermediate_size")
        common = read_common(fields, hidden_size, inner, "silu", VISION_GATES)
        groups = fields.integer("window_size") // common.merge_size // common.patch_size
        if groups < 1:
            raise fields.error("window_size", "a window must hold a group of patches")
        full = frozenset(fields.integers("fullatt_block_indexes"))
        return cls(**vars(common), window_groups=groups, full_blocks=full)


def window_order(grid: Grid, merge_size: int, window_groups: int) -> tuple[Int64, list[int]]:
    """Return the groups in the order of their windows, int64 [G], and the windows' bounds.

    grid: grid of patches. The bounds are cumulative lengths in patches, from 0. Windows follow each
    other row by row within a frame, and so do the groups within a window.
    """
    frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
    frame, row, column = np.indices((frames, rows, columns)) // np.reshape(
        (1, window_groups, window_groups), (3, 1, 1, 1)
    )
    across, down = -(-columns // window_groups), -(-rows // window_groups)
    window = ((frame * down + row) * across + column).ravel()
    lengths = np.bincount(window) * merge_size**2
    return np.argsort(window, kind="stable"), [0, *np.cumsum(lengths).tolist()]


def rms_norm(name: str, size: int, factory: ParamFactory) -> nn.Module:
    """Return an RMS norm."""
    return RMSNorm(name, size, NORM_EPS, factory)


class Qwen25VLTower(QwenTower):
    """The tower up to the embeddings [num_tokens, W]; see QwenTower."""

    spec: Qwen25VLVisionSpec

    def __init__(self, spec: Qwen25VLVisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec, factory, spec.outputs)
        self.blocks = self.make_blocks(factory, rms_norm, ("gate_proj", "up_proj"), "down_proj")
        norm = rms_norm("visual.merger.ln_q", spec.width, factory)
        names = ("visual.merger.mlp.0", "visual.merger.mlp.2")
        self.merger = PatchMerger(norm, names, spec, factory)

    def states(
        self, x_TD: torch.Tensor, attention: BlockAttention, rotary_rows: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """See VisionTower."""
        for number, block in enumerate(self.blocks):
            cut = FRAMES if number in self.spec.full_blocks else WINDOWS
            x_TD = block(x_TD, attention, cut, rotary_rows)
        return [x_TD]

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        spec, grid = self.spec, grid_of(image)
        order_G, windows = window_order(grid, spec.merge_size, spec.window_groups)
        positions = merge_order_positions(grid, spec.merge_size)
        rows = self.rotary_rows(positions.reshape(-1, spec.group, 2)[order_G].reshape(-1, 2))
        x_TD = self.embedded_patches(image)
        order = torch.from_numpy(order_G).to(self.device)
        x_TD = x_TD.unflatten(0, (-1, spec.group))[order].flatten(0, 1)
        (x_TD,) = self.run_blocks(x_TD, [frame_bounds(grid), windows], rows)
        merged: torch.Tensor = self.merger(x_TD)
        return merged[order.argsort()]
