"""The vision tower of Qwen3-VL and its mixture of experts (arXiv 2511.21631).

A learned grid of positions is interpolated to the image's grid and added to its patches. DeepStack
(arXiv 2406.04334) takes features after several blocks, which the text model adds to the hidden
states of its first layers.

Shape legend: T patches, D tower width, W output width.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from quire.models.parts.layers import Embedding, ParamFactory
from quire.models.vision.attention import BlockAttention, Int64
from quire.models.vision.fields import vision_fields
from quire.models.vision.qwen_vl import (
    Grid,
    PatchMerger,
    QwenTower,
    QwenVisionSpec,
    frame_bounds,
    grid_of,
    layer_norm,
    merge_order_positions,
    read_common,
)
from quire.models.vision.tower import ImageArrays
from quire.ops.elementwise import add
from quire.ops.precision import accumulation_dtype
from quire.spec.config_fields import Fields

Float64 = npt.NDArray[np.float64]

DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


@dataclass(frozen=True)
class Qwen3VLVisionSpec(QwenVisionSpec):
    """The sizes of the tower."""

    num_positions: int = 2304  # rows of the position table, a square grid
    deepstack_blocks: tuple[int, ...] = ()  # the blocks after which features are taken

    @classmethod
    def from_config(cls, config: Fields, hidden_size: int) -> Self:
        """Return the spec that `config.json` describes. Raises ModelError for an unsupported field.

        hidden_size: width of the text model."""
        fields = vision_fields(config, DEFAULTS)
        inner = fields.integer("intermediate_size")
        common = read_common(fields, hidden_size, inner, "gelu_pytorch_tanh")
        blocks = fields.integers("deepstack_visual_indexes")
        if len({*blocks}) < len(blocks) or any(block >= common.depth for block in blocks):
            raise fields.error(
                "deepstack_visual_indexes", f"each must be a different block below {common.depth}"
            )
        num_positions = fields.integer("num_position_embeddings")
        return cls(**vars(common), num_positions=num_positions, deepstack_blocks=blocks)


def interpolated_positions(grid: Grid, merge_size: int, side: int) -> tuple[Int64, Float64]:
    """Return the four table entries around each patch, int64 [T, 4], and their weights, float64
    [T, 4], which sum to 1.

    side: rows and columns of the square table of positions. The corners of the table and of the
    grid coincide.
    """
    positions_T2 = merge_order_positions(grid, merge_size)
    spans = np.maximum(np.array(grid[1:]) - 1, 1)
    exact_T2 = positions_T2 * (side - 1) / spans
    low_T2 = np.floor(exact_T2).astype(np.int64)
    high_T2 = np.minimum(low_T2 + 1, side - 1)
    part_T2 = exact_T2 - low_T2
    taps = np.stack((low_T2, high_T2))  # [2, T, 2]
    weights = np.stack((1 - part_T2, part_T2))
    entries = taps[:, None, :, 0] * side + taps[None, :, :, 1]  # [2, 2, T]
    products = weights[:, None, :, 0] * weights[None, :, :, 1]
    return entries.reshape(4, -1).T, products.reshape(4, -1).T


class Qwen3VLTower(QwenTower):
    """The tower up to [num_tokens, (1 + deepstack blocks) * W]; see QwenTower.

    A row holds the embedding, then the features of each deepstack block in the order of the blocks.
    """

    spec: Qwen3VLVisionSpec

    def __init__(self, spec: Qwen3VLVisionSpec, factory: ParamFactory) -> None:
        width = spec.outputs * (1 + len(spec.deepstack_blocks))
        super().__init__(spec, factory, width, patch_bias=True)
        self.positions = Embedding("visual.pos_embed", spec.num_positions, spec.width, factory)
        self.blocks = self.make_blocks(factory, layer_norm, ("linear_fc1",), "linear_fc2")
        self.merger = self._merger("visual.merger", factory)
        self.deepstack = nn.ModuleList(
            self._merger(f"visual.deepstack_merger_list.{number}", factory, norms_groups=True)
            for number in range(len(spec.deepstack_blocks))
        )

    def _merger(
        self, name: str, factory: ParamFactory, *, norms_groups: bool = False
    ) -> PatchMerger:
        size = self.spec.width * (self.spec.group if norms_groups else 1)
        norm = layer_norm(f"{name}.norm", size, factory)
        names = (f"{name}.linear_fc1", f"{name}.linear_fc2")
        return PatchMerger(norm, names, self.spec, factory, norms_groups=norms_groups)

    @property
    def numbers_per_token(self) -> int:
        """See VisionTower. The states of all deepstack blocks exist at once."""
        deepstack_values = self.spec.group * self.spec.width * len(self.spec.deepstack_blocks)
        return super().numbers_per_token + deepstack_values

    def states(
        self, x_TD: torch.Tensor, attention: BlockAttention, rotary_rows: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """See VisionTower. The last state comes first, then the states after deepstack blocks."""
        taken = []
        for number, block in enumerate(self.blocks):
            x_TD = block(x_TD, attention, 0, rotary_rows)
            if number in self.spec.deepstack_blocks:
                taken.append(x_TD)
        return [x_TD, *taken]

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        spec, grid = self.spec, grid_of(image)
        rows = self.rotary_rows(merge_order_positions(grid, spec.merge_size))
        x_TD = add(self.embedded_patches(image), self._embedded_positions(grid))
        last_TD, *taken = self.run_blocks(x_TD, [frame_bounds(grid)], rows)
        deepstack_order = [
            spec.deepstack_blocks.index(block) for block in sorted(spec.deepstack_blocks)
        ]
        features = [self.deepstack[i](x_TD) for i, x_TD in zip(deepstack_order, taken, strict=True)]
        return torch.cat((self.merger(last_TD), *features), dim=1)

    def _embedded_positions(self, grid: Grid) -> torch.Tensor:
        """Return the interpolated embedding of each patch's position, [T, D]."""
        side = math.isqrt(self.spec.num_positions)
        entries, weights = interpolated_positions(grid, self.spec.merge_size, side)
        ids = torch.from_numpy(np.ascontiguousarray(entries)).to(self.device)
        exact = torch.from_numpy(weights).to(self.device, accumulation_dtype(self.dtype))
        found = self.positions(ids.flatten()).unflatten(0, ids.shape)
        mixed_TD: torch.Tensor = (found * exact[:, :, None]).sum(1).to(self.dtype)
        return mixed_TD
