"""Linear attention by the gated delta rule (Gated Delta Networks, Yang et al. 2025), as Qwen 3 Next
and Qwen 3.5 have it.

Shape legend: T tokens, D model dim, C channels of the convolution, N value heads, E the size of
their vectors, M = N E, K key heads.
"""

from collections.abc import Container
from types import MappingProxyType

import torch
from torch import nn

from quire.base.linear_attention import LinearAttention
from quire.models.decoder import LayerPlace
from quire.models.layers import Layer, Linear, ParamFactory, Part, Source
from quire.ops.attention.base import AttentionBackend, DeltaHeads
from quire.ops.gated_norm import gated_norm

INSIDE = "linear_attn"


class PlainLinear(Linear):
    """A linear layer that is never quantised: it is small, and checkpoints that are quantised have
    it in plain numbers."""

    keeps_dtype = True


class DeltaRule(Layer):
    """What is not a matrix: weights of the convolution, how fast each head's memory decays, and the
    norm of what is read of it."""

    neutral = MappingProxyType({"rate": 1.0, "shift": 0.0, "norm": 1.0})

    def __init__(self, name: str, sizes: LinearAttention, factory: ParamFactory) -> None:
        super().__init__()
        self._name = name
        self.convolution = factory.parameter(sizes.channels, sizes.width)
        self.rate = factory.exact_parameter(sizes.value_heads)
        self.shift = factory.exact_parameter(sizes.value_heads)
        self.norm = factory.parameter(sizes.value_dim)

    def sources(self) -> list[Source]:
        channels, width = self.convolution.shape
        middle = Part(1, 0, 1, (channels, 1, width))
        return [
            Source(f"{self._name}.conv1d.weight", self.convolution, part=middle),
            Source(f"{self._name}.A_log", self.rate, is_logarithm=True),
            Source(f"{self._name}.dt_bias", self.shift),
            Source(f"{self._name}.norm.weight", self.norm),
        ]


class Inputs(Linear):
    """Queries, keys and values, and gates of the output.

    by_key_head: whether checkpoints have one module of them all, in which they stand together for
    each key head. GGUF files have a matrix of the first three and one of the gates all the same.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        sizes: LinearAttention,
        factory: ParamFactory,
        *,
        by_key_head: bool,
    ) -> None:
        keys, values = sizes.keys_size, sizes.values_size
        names, outputs = ["in_proj_qkv", "in_proj_z"], [sizes.channels, values]
        modules = [f"{name}.{each}" for each in names]
        super().__init__(modules, hidden, outputs, factory)
        self._together = f"{name}.in_proj_qkvz.weight"
        self._order = rows_of_key_heads((keys, keys, values, values), sizes.key_heads)
        self._by_key_head = self._is_usual = by_key_head

    def adopt(self, stored: Container[str]) -> None:
        """Learn which of them the weight files hold."""
        apart = super().sources()[0].name
        self._by_key_head = self._is_usual and apart not in stored

    def sources(self) -> list[Source]:
        if self._by_key_head:
            return [Source(self._together, self.weight, order=self._order)]
        return super().sources()


class LinearAttentionLayer(nn.Module):
    """Queries, keys and values, convolved; the delta rule; a gated norm and the output."""

    def __init__(self, at: LayerPlace, *, by_key_head: bool) -> None:
        super().__init__()
        sizes, factory = at.spec.linear_attention, at.factory
        name, hidden = f"{at.name}.{INSIDE}", at.spec.hidden_size
        keys, heads = sizes.key_heads, sizes.value_heads
        self._layer, self._eps = at.layer, at.spec.layers.norm_eps
        self._heads = DeltaHeads(keys, heads, sizes.key_dim, sizes.value_dim)
        self._split = [sizes.channels, sizes.values_size]
        self.inputs = Inputs(name, hidden, sizes, factory, by_key_head=by_key_head)
        names, outputs, orders = ["in_proj_b", "in_proj_a"], [heads, heads], []
        if by_key_head:
            names, outputs = ["in_proj_ba"], [2 * heads]
            orders = [rows_of_key_heads((heads, heads), keys)]
        modules = [f"{name}.{each}" for each in names]
        self.gates = PlainLinear(modules, hidden, outputs, factory, orders=orders)
        self.rule = DeltaRule(name, sizes, factory)
        self.output = Linear([f"{name}.out_proj"], sizes.values_size, [hidden], factory)

    def forward(
        self, x_TD: torch.Tensor, _: torch.Tensor | None, backend: AttentionBackend
    ) -> torch.Tensor:
        rule, heads = self.rule, self._heads
        qkv_TC, gate_TM = self.inputs(x_TD).split(self._split, dim=1)
        qkv_TC = backend.convolve(self._layer, qkv_TC, rule.convolution)
        read_TNE = backend.delta_rule(
            self._layer, qkv_TC, self.gates(x_TD), rule.rate, rule.shift, heads
        )
        gate_TNE = gate_TM.unflatten(1, (heads.values, heads.value_dim))
        normed_TNE = gated_norm(read_TNE, gate_TNE, rule.norm, self._eps)
        out: torch.Tensor = self.output(normed_TNE.flatten(1))
        return out


def rows_of_key_heads(sizes: tuple[int, ...], key_heads: int) -> torch.Tensor:
    """Order the rows of a projection, int64, whose parts of these sizes stand together for each key
    head, so that they stand one after the other."""
    each = [size // key_heads for size in sizes]
    rows_KM = torch.arange(sum(sizes)).view(key_heads, -1)
    return torch.cat([part.flatten() for part in rows_KM.split(each, dim=1)])
