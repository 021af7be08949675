"""Shared parts of the Qwen families' vision towers: patches in merge order, and their merging.

A processor cuts images into patches (`render/media/qwen_vl.py`): groups of merge_size x merge_size
patches follow each other row by row. A tower attends within each frame, and its merger makes one
embedding of each group (Qwen2-VL, arXiv 2409.12191).

Shape legend: T patches, G groups of patches, D tower width, W output width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from quire.models.parts.layers import LayerNorm, Linear, ParamFactory, StreamNorm
from quire.models.vision.attention import Int64, axial_rotary_rows
from quire.models.vision.fields import (
    VISION_ACTIVATIONS,
    VISION_GATES,
    axial_theta,
    check_outputs,
    function_of,
    head_dim_of,
)
from quire.models.vision.layers import (
    Activation,
    PatchLinear,
    VisionAttention,
    VisionBlock,
    VisionMLP,
)
from quire.models.vision.tower import ImageArrays, VisionTower, numbers_of_patch
from quire.ops.elementwise import gelu
from quire.spec.config_fields import Fields

NORM_EPS = 1e-6
DEPTH = ("depth", "num_hidden_layers")
HEADS = ("num_heads", "num_attention_heads")

Grid = tuple[int, int, int]  # frames, rows and columns of patches
MakeNorm = Callable[[str, int, ParamFactory], nn.Module]  # name, size


@dataclass(frozen=True)
class QwenVisionSpec:
    """The sizes of a tower of the Qwen families."""

    depth: int  # blocks
    width: int  # D
    heads: int
    head_dim: int
    inner: int  # inner size of feed-forward layers
    outputs: int  # output width of a merger (W)
    activation: str  # activation of feed-forward layers
    patch_size: int  # pixels on each side
    frames_per_patch: int  # an image is repeated in all frames
    merge_size: int  # patches on each side of a group
    theta: float  # base of the rotation

    @property
    def group(self) -> int:
        """Return the number of patches that become one embedding."""
        return self.merge_size**2


def read_common(
    fields: Fields,
    hidden_size: int,
    inner: int,
    activation: str,
    known: Mapping[str, Activation] = VISION_ACTIVATIONS,
    width_name: str = "hidden_size",
    outputs_name: str = "out_hidden_size",
) -> QwenVisionSpec:
    """Return the spec of a tower.

    hidden_size: width of the text model. inner: inner size of feed-forward layers. activation:
    default activation. known: supported activations. width_name, outputs_name: fields of the sizes.
    """
    heads, width = fields.integer(*HEADS), fields.integer(width_name)
    outputs = fields.integer(outputs_name)
    check_outputs(fields, outputs_name, outputs, hidden_size)
    return QwenVisionSpec(
        depth=fields.integer(*DEPTH),
        width=width,
        heads=heads,
        head_dim=head_dim_of(fields, width, heads, multiple=4),
        inner=inner,
        outputs=outputs,
        activation=function_of(fields, "hidden_act", activation, known),
        patch_size=fields.integer("patch_size"),
        frames_per_patch=fields.integer("temporal_patch_size"),
        merge_size=fields.integer("spatial_merge_size"),
        theta=axial_theta(fields),
    )


def merge_order_positions(grid: Grid, merge_size: int) -> Int64:
    """Return the row and column of each patch of a grid, in merge order: int64 [T, 2]."""
    frames, rows, columns = grid
    assert rows % merge_size == columns % merge_size == 0, "patches come in whole groups"
    cell_indices = np.indices((rows, columns))
    cut = cell_indices.reshape(2, rows // merge_size, merge_size, columns // merge_size, merge_size)
    of_frame = cut.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    return np.tile(of_frame, (frames, 1))


def frame_bounds(grid: Grid) -> list[int]:
    """Return the cumulative lengths of the frames of a grid, from 0."""
    frames, rows, columns = grid
    return [frame * rows * columns for frame in range(frames + 1)]


def layer_norm(name: str, size: int, factory: ParamFactory) -> nn.Module:
    """Return a layer norm."""
    return StreamNorm(LayerNorm(name, size, NORM_EPS, factory))


class PatchMerger(nn.Module):
    """A norm and a feed-forward layer that make one row [W] of each group of patches.

    norms_groups: whether the norm covers a whole group instead of each patch.
    """

    def __init__(
        self,
        norm: nn.Module,
        names: tuple[str, str],
        spec: QwenVisionSpec,
        factory: ParamFactory,
        *,
        norms_groups: bool = False,
    ) -> None:
        super().__init__()
        size = spec.width * spec.group
        self.norm, self._group, self._norms_groups = norm, spec.group, norms_groups
        up = Linear([names[0]], size, [size], factory, bias=True)
        down = Linear([names[1]], size, [spec.outputs], factory, bias=True)
        self.mlp = VisionMLP(up, gelu, down)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return [G, W]."""
        if self._norms_groups:
            groups = self.norm(self._grouped(x_TD))[0]
        else:
            groups = self._grouped(self.norm(x_TD)[0])
        out_GW: torch.Tensor = self.mlp(groups)
        return out_GW

    def _grouped(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.reshape(-1, self._group * x_TD.shape[1])


class QwenTower(VisionTower):
    """A tower of the Qwen families. Each family builds blocks and chooses their attention ranges.

    Images have pixels uint8 [T, 3, P, P], videos [T, 3, frames_per_patch, P, P], and a grid of
    frames, rows and columns of patches.
    """

    prefixes = ("visual.",)
    merger: PatchMerger

    def __init__(
        self, spec: QwenVisionSpec, factory: ParamFactory, width: int, *, patch_bias: bool = False
    ) -> None:
        super().__init__(width, factory)
        self.spec = spec
        kernel = (3, spec.frames_per_patch, spec.patch_size, spec.patch_size)
        self.patches = PatchLinear(
            "visual.patch_embed.proj", kernel, spec.width, factory, bias=patch_bias
        )

    @property
    def numbers_per_token(self) -> int:
        """See VisionTower."""
        spec = self.spec
        pixels = 3 * spec.frames_per_patch * spec.patch_size**2
        own = numbers_of_patch(pixels, spec.width, spec.inner)
        return spec.group * own + 2 * self.width

    def make_blocks(
        self, factory: ParamFactory, norm: MakeNorm, up: tuple[str, ...], down: str
    ) -> nn.ModuleList:
        """Return the blocks. up, down: names of the feed-forward layers; two up are gated."""
        spec, size, inner = self.spec, self.spec.width, self.spec.inner
        known = VISION_GATES if len(up) == 2 else VISION_ACTIVATIONS

        def block(name: str) -> VisionBlock:
            qkv = Linear([f"{name}.attn.qkv"], size, [3 * size], factory, bias=True)
            output = Linear([f"{name}.attn.proj"], size, [size], factory, bias=True)
            attention = VisionAttention(qkv, output, spec.heads, spec.head_dim)
            names = [f"{name}.mlp.{part}" for part in up]
            widen = Linear(names, size, [inner] * len(up), factory, bias=True)
            narrow = Linear([f"{name}.mlp.{down}"], inner, [size], factory, bias=True)
            mlp = VisionMLP(widen, known[spec.activation], narrow)
            first, second = (norm(f"{name}.norm{n}", size, factory) for n in (1, 2))
            return VisionBlock(first, attention, second, mlp)

        return nn.ModuleList(block(f"visual.blocks.{number}") for number in range(spec.depth))

    def embedded_patches(self, image: ImageArrays) -> torch.Tensor:
        """Return the embedding of each patch, [T, D]."""
        values = self.values(image, channel_axis=1)
        if values.dim() == 4:  # one image in all frames of a patch
            values = values[:, :, None].expand(-1, -1, self.spec.frames_per_patch, -1, -1)
        x_TD: torch.Tensor = self.patches(values.flatten(1))
        return x_TD

    def rotary_rows(self, positions_T2: Int64) -> torch.Tensor:
        """Return the rotation factors of queries and keys, [T, 1, 2 * head_dim]."""
        spec = self.spec
        return axial_rotary_rows(positions_T2, spec.head_dim, spec.theta, self.dtype, self.device)


def grid_of(image: ImageArrays) -> Grid:
    """Return the frames, rows and columns of an image's patches."""
    frames, rows, columns = image.grid
    assert frames * rows * columns == len(image.pixels), "the grid counts the patches"
    return frames, rows, columns
