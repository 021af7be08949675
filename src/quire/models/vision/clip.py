"""The CLIP tower (arXiv 2103.00020) with the projector of LLaVA 1.5 (arXiv 2310.03744).

The projector reads states between layers; in most checkpoints, the input of the last layer.
LLaVA-NeXT (LLaVA 1.6, the authors' report of January 2024) joins the features of the tiles and
removes the padding. It ends each row with a learned newline feature.

Shape legend: S squares, T positions of all squares, L positions of one, D tower width, W output
width.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch

from quire.models.parts.layers import Embedding, LayerNorm, Linear, ParamFactory
from quire.models.vision.attention import BlockAttention
from quire.models.vision.fields import VISION_ACTIVATIONS, function_of
from quire.models.vision.layers import NamedVector, PatchLinear, VisionMLP
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

MODEL_TYPE = "clip_vision_model"
PROJECTOR = "multi_modal_projector"
NEWLINE = "image_newline"
LLAVA_NEXT = "llava_next"
DROPS_CLASS, KEEPS_CLASS = "default", "full"  # vision_feature_select_strategy
DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class LlavaVisionSpec:
    """The sizes of the tower and of the projector."""

    tower: SquareSpec
    outputs: int  # output width (W)
    layers: tuple[int, ...]  # states that the projector reads; 0 is the input of layer 0
    keeps_class: bool  # whether the class token also becomes an embedding
    activation: str  # activation of the projector
    bias: bool  # whether the projector has biases

    @classmethod
    def from_config(cls, config: Fields, hidden_size: int) -> Self:
        """Return the spec that `config.json` describes. Raises ModelError for an unsupported field.

        hidden_size: width of the text model."""
        tower = SquareSpec.from_config(config, MODEL_TYPE, DEFAULTS, "quick_gelu")
        strategy = config.text("vision_feature_select_strategy", DROPS_CLASS)
        if strategy not in (DROPS_CLASS, KEEPS_CLASS):
            raise config.error(
                "vision_feature_select_strategy", f"supported are {DROPS_CLASS} and {KEEPS_CLASS}"
            )
        if strategy == KEEPS_CLASS and config.text("model_type", "") == LLAVA_NEXT:
            raise config.error(
                "vision_feature_select_strategy", f"tiles have no class token; use {DROPS_CLASS}"
            )
        return cls(
            tower=tower,
            outputs=hidden_size,
            layers=_feature_layers(config, tower.depth),
            keeps_class=strategy == KEEPS_CLASS,
            activation=function_of(config, "projector_hidden_act", "gelu", VISION_ACTIVATIONS),
            bias=config.flag("multimodal_projector_bias", default=True),
        )


def _feature_layers(config: Fields, depth: int) -> tuple[int, ...]:
    """Return the indices of the states that the projector reads, counted from 0."""
    name = "vision_feature_layer"
    value = -2 if config.value(name) is None else config.value(name)
    found = value if isinstance(value, list) else [value]
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int) or not -depth - 1 <= each <= depth:
            raise config.error(name, f"it must be of the states from {-depth - 1} to {depth}")
    if not found:
        raise config.error(name, "it must name a layer")
    return tuple(each % (depth + 1) for each in found)


class LlavaTower(VisionTower):
    """CLIP with LLaVA's projector, up to the embeddings [num_tokens, W].

    Images have pixels uint8 [S, H, W, 3] of the tower's size; LLaVA 1.5 has one square per image.
    """

    prefixes: tuple[str, ...] = (f"{PREFIX}.", f"{PROJECTOR}.")

    def __init__(self, spec: LlavaVisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec.outputs, factory)
        self.spec, tower = spec, spec.tower
        name, patch = f"{PREFIX}.embeddings", tower.patch_size
        self.class_token = NamedVector(f"{name}.class_embedding", tower.width, factory)
        self.patches = PatchLinear(
            f"{name}.patch_embedding", (3, patch, patch), tower.width, factory, bias=False
        )
        self.positions = Embedding(
            f"{name}.position_embedding", tower.side**2 + 1, tower.width, factory
        )
        self.norm = LayerNorm(f"{PREFIX}.pre_layrnorm", tower.width, tower.eps, factory)
        self.blocks = square_blocks(tower, max(spec.layers), factory)
        names = [f"{PROJECTOR}.linear_{number}" for number in (1, 2)]
        inputs, outputs = tower.width * len(spec.layers), spec.outputs
        up = Linear(names[:1], inputs, [outputs], factory, bias=spec.bias)
        down = Linear(names[1:], outputs, [outputs], factory, bias=spec.bias)
        self.projector = VisionMLP(up, VISION_ACTIVATIONS[spec.activation], down)
        later = (
            f"{PREFIX}.encoder.layers.{number}." for number in range(len(self.blocks), tower.depth)
        )
        norm, constant = f"{PREFIX}.post_layernorm.", f"{PREFIX}.embeddings.position_ids"
        self.unused = (norm, constant, *later)

    @property
    def max_tokens(self) -> int | None:
        """See VisionTower."""
        return self.spec.tower.side**2 + self.spec.keeps_class

    @property
    def numbers_per_token(self) -> int:
        """See VisionTower. All states exist at once, because the projector reads some of them."""
        spec, num = self.spec, self.spec.tower.side**2
        states = (len(self.blocks) + 1 + len(spec.layers)) * spec.tower.width
        return spec.tower.numbers // num + 2 * states + 5 * self.width

    def states(
        self, x_TD: torch.Tensor, attention: BlockAttention, rotary_rows: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """See VisionTower. These are the states that the projector reads."""
        states = [x_TD]
        for block in self.blocks:
            states.append(block(states[-1], attention))
        return [states[layer] for layer in self.spec.layers]

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower."""
        return self.projected(image).flatten(0, 1)

    def projected(self, image: ImageArrays) -> torch.Tensor:
        """Return the projected features of each square, [S, L, W]; L counts the class token if it
        is kept."""
        tower = self.spec.tower
        patches_TD = self.patches(cut_into_patches(self.values(image, channel_axis=3), tower))
        squares = patches_TD.unflatten(0, (-1, tower.side**2))
        num, length = squares.shape[0], squares.shape[1] + 1
        token = self.class_token.weight.expand(num, 1, -1)
        positions = torch.arange(length, device=self.device).repeat(num)
        embedded_TD = torch.cat((token, squares), dim=1).flatten(0, 1)
        x_TD = self.norm(add(embedded_TD, self.positions(positions)))
        read = torch.cat(self.run_blocks(x_TD, [square_bounds(num, length)]), dim=1)
        squares = read.unflatten(0, (num, length))
        if not self.spec.keeps_class:
            squares = squares[:, 1:]
        out: torch.Tensor = self.projector(squares.flatten(0, 1))
        return out.view(num, -1, self.width)


class LlavaNextTower(LlavaTower):
    """CLIP with the projector and the tiles of LLaVA-NeXT, up to the embeddings [num_tokens, W].

    Images have pixels uint8 [1 + tiles, H, W, 3]: the whole image, then the tiles row by row. Their
    grid is (rows of tiles, columns of tiles, rows of features, columns of features). The last two
    count the features of the tiles that no padding fills.
    """

    prefixes = (*LlavaTower.prefixes, NEWLINE)

    def __init__(self, spec: LlavaVisionSpec, factory: ParamFactory) -> None:
        super().__init__(spec, factory)
        self.newline = NamedVector(NEWLINE, spec.outputs, factory)

    @property
    def max_tokens(self) -> int | None:
        """See VisionTower. The number of tiles is not bounded here."""
        return None

    @property
    def numbers_per_token(self) -> int:
        """See VisionTower. Half of the features may belong to padding and become no tokens."""
        return 2 * super().numbers_per_token

    def encode(self, image: ImageArrays) -> torch.Tensor:
        """See VisionTower. Rows of the whole image come first, then rows of the tiles."""
        whole, tiles = self.projected(image).split((1, len(image.pixels) - 1))
        return torch.cat((whole[0], self._assembled(tiles, image.grid)))

    def _assembled(self, tiles: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """Return the features of the tiles' grid without padding, with a newline after each row.

        tiles: [S, side * side, W]. The padding is equally wide on opposite sides.
        """
        down, across, rows, columns = grid
        side = self.spec.tower.side
        cells = tiles.unflatten(1, (side, side)).unflatten(0, (down, across))
        picture = cells.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = (down * side - rows) // 2, (across * side - columns) // 2
        cropped = picture[top : top + rows, left : left + columns]
        newline = self.newline.weight.expand(rows, 1, -1)
        return torch.cat((cropped, newline), dim=1).flatten(0, 1)
