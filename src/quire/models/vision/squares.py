"""Shared parts of the SigLIP and CLIP towers: squares of one size, learned positions, and layers
with a norm before each part (ViT, arXiv 2010.11929).

Shape legend: S squares, T positions of all squares, L positions of one, D tower width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.parts.layers import LayerNorm, Linear, ParamFactory, StreamNorm
from quire.models.vision.fields import VISION_ACTIVATIONS, function_of, head_dim_of, vision_fields
from quire.models.vision.layers import VisionAttention, VisionBlock, VisionMLP
from quire.models.vision.tower import numbers_of_patch
from quire.spec.config_fields import Fields

PREFIX = "vision_tower"


@dataclass(frozen=True)
class SquareSpec:
    """The sizes of a tower that reads squares."""

    depth: int  # layers
    width: int  # D
    heads: int
    head_dim: int
    inner: int  # inner size of feed-forward layers
    activation: str
    eps: float  # epsilon of the norms
    image_size: int  # pixels on each side of a square
    patch_size: int  # pixels on each side of a patch

    @classmethod
    def from_config(
        cls, config: Fields, model_type: str, defaults: Mapping[str, Any], activation: str
    ) -> Self:
        """Return the spec that `vision_config` describes.

        model_type: required type of the tower. defaults: values of absent fields. activation:
        default activation. Raises ModelError for a field that the tower does not implement.
        """
        fields = vision_fields(config, defaults)
        if fields.text("model_type", model_type) != model_type:
            raise fields.error("model_type", f"images are read by {model_type} only")
        width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        spec = cls(
            depth=fields.integer("num_hidden_layers"),
            width=width,
            heads=heads,
            head_dim=head_dim_of(fields, width, heads),
            inner=fields.integer("intermediate_size"),
            activation=function_of(fields, "hidden_act", activation, VISION_ACTIVATIONS),
            eps=fields.number("layer_norm_eps"),
            image_size=fields.integer("image_size"),
            patch_size=fields.integer("patch_size"),
        )
        if spec.side < 1:
            raise fields.error("patch_size", f"it must be at most image_size, {spec.image_size}")
        return spec

    @property
    def side(self) -> int:
        """Return the number of patches on each side of a square."""
        return self.image_size // self.patch_size

    @property
    def numbers(self) -> int:
        """Return the peak number of values that the tower holds for a square."""
        pixels = 3 * self.image_size**2 // self.side**2  # includes edges that fill no patch
        return (self.side**2 + 1) * numbers_of_patch(pixels, self.width, self.inner)


def cut_into_patches(values: torch.Tensor, spec: SquareSpec) -> torch.Tensor:
    """Return the patches of squares, [S * side * side, 3 * patch * patch], row by row.

    values: [S, H, W, 3]. Incomplete patches at the right and lower edges are dropped.
    Raises ModelError for squares of another size than the tower's.
    """
    height, width = values.shape[1:3]
    if (height, width) != (spec.image_size, spec.image_size):
        raise ModelError(
            f"preprocessor_config.json makes images of {width} x {height} pixels, but the vision"
            f" tower reads {spec.image_size} x {spec.image_size}; make the two agree."
        )
    side, patch = spec.side, spec.patch_size
    whole = values[:, : side * patch, : side * patch]
    cut = whole.unflatten(2, (side, patch)).unflatten(1, (side, patch))
    patches: torch.Tensor = cut.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(0, 2)
    return patches


def square_blocks(spec: SquareSpec, depth: int, factory: ParamFactory) -> nn.ModuleList:
    """Return the first layers of a tower, `depth` of them."""
    return nn.ModuleList(
        _square_block(f"{PREFIX}.encoder.layers.{number}", spec, factory) for number in range(depth)
    )


def _square_block(name: str, spec: SquareSpec, factory: ParamFactory) -> VisionBlock:
    size, inner = spec.width, spec.inner
    norms = [
        StreamNorm(LayerNorm(f"{name}.{norm}", size, spec.eps, factory))
        for norm in ("layer_norm1", "layer_norm2")
    ]
    parts = [f"{name}.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    qkv = Linear(parts, size, [size] * 3, factory, bias=True)
    output = Linear([f"{name}.self_attn.out_proj"], size, [size], factory, bias=True)
    up = Linear([f"{name}.mlp.fc1"], size, [inner], factory, bias=True)
    down = Linear([f"{name}.mlp.fc2"], inner, [size], factory, bias=True)
    mlp = VisionMLP(up, VISION_ACTIVATIONS[spec.activation], down)
    attention = VisionAttention(qkv, output, spec.heads, spec.head_dim)
    return VisionBlock(norms[0], attention, norms[1], mlp)


def square_bounds(squares: int, length: int) -> list[int]:
    """Return the cumulative lengths of squares with `length` positions each, from 0."""
    return [length * number for number in range(squares + 1)]
