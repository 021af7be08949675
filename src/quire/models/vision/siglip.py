"""The SigLIP tower (arXiv 2303.15343) with the projector of Gemma 3 (arXiv 2503.19786).

Attention stays within each square. The projector averages the tower's features over groups of
patches, so that each square becomes mm_tokens_per_image embeddings. It then normalises and projects
them.

Shape legend: S squares, T patches of all squares, D tower width, W output width.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from quire.models.checkpoint.sources import Source
from quire.models.parts.layers import Embedding, LayerNorm, Linear, ParamFactory, RMSNorm
from quire.models.vision.layers import PatchLinear
from quire.models.vision.squares import (
    PREFIX,
    SquareSpec,
    cut_into_patches,
    square_blocks,
    square_bounds,
)
from quire.models.vision.tower import ImageArrays, VisionTower
from quire.ops.elementwise import add
from quire.spec.config_fields import Fields

MODEL_TYPE = "siglip_vision_model"
PROJECTOR = "multi_modal_projector"
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "layer_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Gemma3VisionSpec:
    """The sizes of the tower and of the projector."""

    tower: SquareSpec
    outputs: int  # output width (W)
    pooled_side: int  # embeddings on each side of a square

    @classmethod
    def from_config(cls, config: Fields, hidden_size: int) -> Self:
        """Return the spec that `config.json` describes. Raises ModelError for an unsupported field.

        hidden_size: width of the text model."""
        tower = SquareSpec.from_config(config, MODEL_TYPE, DEFAULTS, "gelu_pytorch_tanh")
        tokens = config.integer("mm_tokens_per_image", default=256)
        side = math.isqrt(tokens)
        if side * side != tokens or side > tower.side or tower.side // (tower.side // side) != side:
            raise config.error(
                "mm_tokens_per_image",
                f"it must be the square of a number that divides {tower.side}, the patches on each"
                " side of an image",
            )
        return cls(tower, hidden_size, side)


class NamedProjection(Linear):
    """A projection that the checkpoint stores under exactly this name, as [inputs, outputs]."""

    def __init__(self, name: str, inputs: int, outputs: int, factory: ParamFactory) -> None:
        super().__init__([name], inputs, [outputs], factory, transposed=True)
        self._name = name

    def sources(self) -> list[Source]:
        """See Layer."""
        return [replace(source, name=self._name) for source in super().sources()]


class Gemma3Projector(nn.Module):
    """The average of each group of patches, a norm, and a projection to the text model's width."""

    def __init__(self, spec: Gemma3VisionSpec, factory: ParamFactory) -> None:
        super().__init__()
        width = spec.tower.width
        self._patches, self._pooled = spec.tower.side, spec.pooled_side
        self.norm = RMSNorm(
            f"{PROJECTOR}.mm_soft_emb_norm", width, spec.tower.eps, factory, offset=1.0
        )
        self.projection = NamedProjection(
            f"{PROJECTOR}.mm_input_projection_weight", width, spec.outputs, factory
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map features x [T, D] to embeddings [num_tokens, W], pooled_side ** 2 for each square."""
        side, pooled = self._patches, self._pooled
        kernel = side // pooled
        grid = x_TD.unflatten(0, (-1, side, side))[:, : pooled * kernel, : pooled * kernel]
        cells = grid.unflatten(2, (pooled, kernel)).unflatten(1, (pooled, kernel))
        means = cells.mean((2, 4)).flatten(0, 2)
        out: torch.Tensor = self.projection(self.norm(means)[0])
        return out


class Gemma3Tower(VisionTower):
    """SigLIP with Gemma 3's projector, up to the embeddings [num_tokens, W].

    Images have pixels uint8 [S, H, W, 3]: the image and its crops, each of the tower's size.
    """

    prefixes = (f"{PREFIX}.", f"{PROJECTOR}.")
    unused = (f"{PREFIX}.head.", f"{PREFIX}.embeddings.position_ids")  # a pooling head; a constant

    def __init__(self, spec: Gemma3VisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec.outputs, factory)
        self.spec, tower = spec, spec.tower
        name, patch = f"{PREFIX}.embeddings", tower.patch_size
        self.patches = PatchLinear(
            f"{name}.patch_embedding", (3, patch, patch), tower.width, factory, bias=True
        )
        self.positions = Embedding(
            f"{name}.position_embedding", tower.side**2, tower.width, factory
        )
        self.blocks = square_blocks(tower, tower.depth, factory)
        self.norm = LayerNorm(f"{PREFIX}.post_layernorm", tower.width, tower.eps, factory)
        self.projector = Gemma3Projector(spec, factory)

    @property
    def max_tokens(self) -> int | None:
        """See VisionTower. Each crop is a separate media item."""
        return self.spec.pooled_side**2

    @property
    def numbers_per_token(self) -> int:
        """See VisionTower."""
        return self.spec.tower.numbers // self.spec.pooled_side**2 + 2 * self.width

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        tower, squares = self.spec.tower, len(image.pixels)
        length = tower.side**2
        values = self.values(image, channel_axis=3)
        positions = torch.arange(length, device=self.device).repeat(squares)
        x_TD = add(self.patches(cut_into_patches(values, tower)), self.positions(positions))
        (x_TD,) = self.run_blocks(x_TD, [square_bounds(squares, length)])
        out: torch.Tensor = self.projector(self.norm(x_TD))
        return out
