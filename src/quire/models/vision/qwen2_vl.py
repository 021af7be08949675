"""The vision tower of Qwen2-VL (arXiv 2409.12191): layer norms, and attention within each frame.

Shape legend: T patches, D tower width, W output width.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from quire.base.config_fields import Fields
from quire.models.layers import LayerNorm, Linear, ParamFactory, StreamNorm
from quire.models.vision.attention import BlockAttention
from quire.models.vision.fields import VISION_ACTIVATIONS, check_outputs, function_of, vision_fields
from quire.models.vision.layers import VisionBlock, VisionMLP
from quire.models.vision.qwen_vl import (
    NORM_EPS,
    PatchMerger,
    QwenTower,
    QwenVisionSpec,
    frame_bounds,
    grid_of,
    merge_order_positions,
    read_common,
)
from quire.models.vision.tower import ImageArrays

DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Qwen2VLVisionSpec(QwenVisionSpec):
    """The sizes of the tower."""

    @classmethod
    def from_config(cls, config: Fields, hidden_size: int) -> Self:
        """Return the spec that `config.json` describes. hidden_size: of the text model.

        Raises ModelError for a field that the tower does not implement.
        """
        fields = vision_fields(config, DEFAULTS)
        width, outputs = fields.integer("embed_dim"), fields.integer("hidden_size")
        check_outputs(fields, "hidden_size", outputs, hidden_size)
        inner = int(width * fields.number("mlp_ratio"))
        activation = function_of(fields, "hidden_act", "quick_gelu", VISION_ACTIVATIONS)
        return cls(**vars(read_common(fields, width, inner, outputs, activation)))


class Qwen2VLTower(QwenTower):
    """The tower up to the embeddings [num_tokens, W]; see QwenTower."""

    def __init__(self, spec: Qwen2VLVisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec, factory, spec.outputs)
        self.blocks = nn.ModuleList(
            self._block(f"visual.blocks.{number}", factory) for number in range(spec.depth)
        )
        norm = StreamNorm(LayerNorm("visual.merger.ln_q", spec.width, NORM_EPS, factory))
        names = ("visual.merger.mlp.0", "visual.merger.mlp.2")
        self.merger = PatchMerger(norm, names, spec, factory)

    def _block(self, name: str, factory: ParamFactory) -> VisionBlock:
        size, inner = self.spec.width, self.spec.inner
        norms = [
            StreamNorm(LayerNorm(f"{name}.{norm}", size, NORM_EPS, factory))
            for norm in ("norm1", "norm2")
        ]
        up = Linear([f"{name}.mlp.fc1"], size, [inner], factory, bias=True)
        down = Linear([f"{name}.mlp.fc2"], inner, [size], factory, bias=True)
        mlp = VisionMLP(up, VISION_ACTIVATIONS[self.spec.activation], down)
        return VisionBlock(norms[0], self.attention_of(name, factory), norms[1], mlp)

    def states(
        self, x_TD: torch.Tensor, attention: BlockAttention, rotary_rows: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """See VisionTower."""
        for block in self.blocks:
            x_TD = block(x_TD, attention, 0, rotary_rows)
        return [x_TD]

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        grid = grid_of(image)
        rows = self.rotary_rows(merge_order_positions(grid, self.spec.merge_size))
        (x_TD,) = self.run_blocks(self.embedded_patches(image), [frame_bounds(grid)], rows)
        merged: torch.Tensor = self.merger(x_TD)
        return merged
