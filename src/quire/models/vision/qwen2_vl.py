"""The vision tower of Qwen2-VL (arXiv 2409.12191): layer norms, and attention within each frame.

Shape legend: T patches, D tower width, W output width.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from quire.models.parts.layers import ParamFactory
from quire.models.vision.fields import vision_fields
from quire.models.vision.qwen_vl import (
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
from quire.spec.config_fields import Fields

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
        """Return the spec that `config.json` describes. Raises ModelError for an unsupported field.

        hidden_size: width of the text model."""
        fields = vision_fields(config, DEFAULTS)
        inner = int(fields.integer("embed_dim") * fields.number("mlp_ratio"))
        common = read_common(
            fields, hidden_size, inner, "quick_gelu",
            width_name="embed_dim", outputs_name="hidden_size",
        )  # fmt: skip
        return cls(**vars(common))


class Qwen2VLTower(QwenTower):
    """The tower up to the embeddings [num_tokens, W]; see QwenTower."""

    def __init__(self, spec: Qwen2VLVisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec, factory, spec.outputs)
        self.blocks = self.make_blocks(factory, layer_norm, ("fc1",), "fc2")
        norm = layer_norm("visual.merger.ln_q", spec.width, factory)
        names = ("visual.merger.mlp.0", "visual.merger.mlp.2")
        self.merger = PatchMerger(norm, names, spec, factory)

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        grid = grid_of(image)
        rows = self.rotary_rows(merge_order_positions(grid, self.spec.merge_size))
        (x_TD,) = self.run_blocks(self.embedded_patches(image), [frame_bounds(grid)], rows)
        merged: torch.Tensor = self.merger(x_TD)
        return merged
