"""The layers that vision towers share.

Shape legend: T patches, D tower width, F feed-forward dim, N heads, H head dim.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from quire.models.checkpoint.sources import Part, Source
from quire.models.parts.layers import Layer, Linear, ParamFactory
from quire.models.vision.attention import BlockAttention
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import add
from quire.ops.rotary import rotary

Activation = Callable[[torch.Tensor], torch.Tensor]


class PatchLinear(Linear):
    """The embedding of patches. Checkpoints hold it as a convolution with a stride of one patch.

    kernel: shape of a patch in the checkpoint's weight [D, *kernel], channels first. The layer is
    never quantised, because the size of a patch is rarely a multiple of a group.
    """

    keeps_dtype = True

    def __init__(
        self, name: str, kernel: tuple[int, ...], size: int, factory: ParamFactory, *, bias: bool
    ) -> None:
        super().__init__([name], math.prod(kernel), [size], factory, bias=bias)
        self._whole = Part(0, 0, size, (size, *kernel))

    def sources(self) -> list[Source]:
        """See Layer."""
        weight, *bias = super().sources()
        return [replace(weight, part=self._whole), *bias]


class NamedVector(Layer):
    """A learned vector [size], stored under exactly this name in the checkpoint."""

    def __init__(self, name: str, size: int, factory: ParamFactory) -> None:
        super().__init__()
        self._name = name
        self.weight = factory.parameter(size)

    def sources(self) -> list[Source]:
        """See Layer."""
        return [Source(self._name, self.weight)]


class VisionAttention(nn.Module):
    """Attention within ranges, with as many KV heads as query heads, and its projections."""

    def __init__(self, qkv: Linear, output: Linear, heads: int, head_dim: int) -> None:
        super().__init__()
        self.qkv, self.output = qkv, output
        self._heads, self._head_dim = heads, head_dim
        self._scores = Scores(head_dim**-0.5)

    def forward(
        self,
        x_TD: torch.Tensor,
        attention: BlockAttention,
        cut: int,
        rotary_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [T, D]. cut: see BlockAttention. rotary_rows: None if positions are embedded."""
        qkv_TMH = self.qkv(x_TD).unflatten(1, (3 * self._heads, self._head_dim))
        q_TNH, k_TNH, v_TNH = qkv_TMH.split(self._heads, dim=1)
        if rotary_rows is not None:
            turned = rotary(qkv_TMH[:, : 2 * self._heads], rotary_rows)
            q_TNH, k_TNH = turned.split(self._heads, dim=1)
        attention.write(cut, k_TNH, v_TNH)
        seen_TNH = attention.run(cut, q_TNH, self._scores)
        out_TD: torch.Tensor = self.output(seen_TNH.flatten(1))
        return out_TD


class VisionMLP(nn.Module):
    """down(activation(up(x))). With a gated activation, `up` computes gate and up together."""

    def __init__(self, up: Linear, activation: Activation, down: Linear) -> None:
        super().__init__()
        self.up, self.down = up, down
        self._activation = activation

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map x [T, D] to the outputs of `down`, [T, outputs]."""
        out: torch.Tensor = self.down(self._activation(self.up(x_TD)))
        return out


class VisionBlock(nn.Module):
    """A layer of a tower: attention and feed-forward, each after a norm and with a residual.

    Norms return the normalised sum and the sum, as `RMSNorm` does.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: VisionAttention,
        mlp_norm: nn.Module,
        mlp: VisionMLP,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def forward(
        self,
        x_TD: torch.Tensor,
        attention: BlockAttention,
        cut: int = 0,
        rotary_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [T, D]; see VisionAttention."""
        normed_TD, x_TD = self.attention_norm(x_TD)
        seen_TD = self.attention(normed_TD, attention, cut, rotary_rows)
        normed_TD, x_TD = self.mlp_norm(seen_TD, x_TD)
        return add(x_TD, self.mlp(normed_TD))
