"""Linear attention with the gated delta rule (Gated Delta Networks, Yang et al. 2025), as in Qwen 3
Next and Qwen 3.5.

Shape legend: T tokens, D model dim, C channels of the convolution, N value heads, E value head dim,
M = N E, K key heads.
"""

from collections.abc import Container
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from quire.models.checkpoint.sources import ALL, Part, Source, Stretches, rows_of
from quire.models.parts.decoder import LayerPlace, LayerStep
from quire.models.parts.layers import Layer, Linear, ParamFactory
from quire.ops.attention_inputs import DeltaHeads
from quire.ops.norms import gated_norm
from quire.spec.cuts import Cut
from quire.spec.linear_attention import LinearAttention

INSIDE = "linear_attn"


@dataclass(frozen=True)
class Heads:
    """The heads of a rank, and the sizes of the whole layer. If ranks outnumber key heads, several
    ranks share a key head."""

    whole: LinearAttention
    keys: Cut
    values: Cut

    @classmethod
    def of_rank(cls, whole: LinearAttention, factory: ParamFactory) -> "Heads":
        """Return the heads of this rank. Raises ConfigError if the ranks cannot divide them."""
        keys = factory.place.cut_or_repeat(whole.key_heads, "linear_num_key_heads")
        return cls(whole, keys, factory.place.cut(whole.value_heads, "linear_num_value_heads"))

    @property
    def of_values(self) -> Cut:
        """Return the rank's range of value dimensions (M)."""
        return self.values.times(self.whole.value_dim)

    @property
    def channels(self) -> list[Cut]:
        """Return the rank's channels of the convolution: queries, keys and values."""
        keys = self.keys.times(self.whole.key_dim)
        return [keys, keys, self.of_values]


class PlainLinear(Linear):
    """A linear layer that is never quantised. It is small, and quantised checkpoints hold it in
    plain numbers."""

    keeps_dtype = True


class DeltaRule(Layer):
    """The parameters that are not matrices of inputs and outputs.

    convolution: [C, width]. rate, shift: decay of each head's state, [N]. norm: weight of the norm
    of a head's output, [E].
    """

    neutral = MappingProxyType({"rate": 1.0, "shift": 0.0, "norm": 1.0})

    def __init__(self, name: str, sizes: Heads, factory: ParamFactory) -> None:
        super().__init__()
        self._name, self._whole = name, (sizes.whole.channels, 1, sizes.whole.width)
        self._channels, self._heads = rows_of(sizes.channels), rows_of(sizes.values)
        self.convolution = factory.parameter(self._channels.count, sizes.whole.width)
        self.rate = factory.exact_parameter(self._heads.count)
        self.shift = factory.exact_parameter(self._heads.count)
        self.norm = factory.parameter(sizes.whole.value_dim)

    def sources(self) -> list[Source]:
        middle = Part(1, 0, 1, self._whole)
        rows, order = self._channels.taken()
        own, _ = self._heads.taken()
        weight = f"{self._name}.conv1d.weight"
        return [
            Source(weight, self.convolution, part=middle, rows=rows, order=order),
            Source(f"{self._name}.A_log", self.rate, is_logarithm=True, rows=own),
            Source(f"{self._name}.dt_bias", self.shift, rows=own),
            Source(f"{self._name}.norm.weight", self.norm),
        ]

    def stretches(self, name: str) -> Stretches:
        """See Layer. Only the convolution gets random values."""
        return Stretches(self._channels.cuts) if name == "convolution" else ALL


class Inputs(Linear):
    """The projection to queries, keys, values and output gates.

    by_key_head: whether checkpoints merge all four in one module, grouped by key head. GGUF files
    always have one matrix of queries, keys and values, and one of gates.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        sizes: Heads,
        factory: ParamFactory,
        *,
        by_key_head: bool,
    ) -> None:
        keys, values = sizes.whole.keys_size, sizes.whole.values_size
        names, outputs = ["in_proj_qkv", "in_proj_z"], [sizes.channels, [sizes.of_values]]
        modules = [f"{name}.{each}" for each in names]
        super().__init__(modules, hidden, outputs, factory)
        self._together = f"{name}.in_proj_qkvz.weight"
        order = rows_of_key_heads((keys, keys, values, values), sizes.whole.key_heads)
        self._of_all = rows_of([*sizes.channels, sizes.of_values], order)
        self._by_key_head = self._is_usual = by_key_head

    def adopt(self, stored: Container[str]) -> None:
        """Detect which layout the weight files have."""
        apart = super().sources()[0].name
        self._by_key_head = self._is_usual and apart not in stored

    def sources(self) -> list[Source]:
        if self._by_key_head:
            rows, order = self._of_all.taken()
            return [Source(self._together, self.weight, rows=rows, order=order)]
        return super().sources()


class LinearAttentionLayer(nn.Module):
    """Projections, a convolution, the delta rule, a gated norm and the output projection."""

    def __init__(self, at: LayerPlace, *, by_key_head: bool) -> None:
        super().__init__()
        whole, factory = at.spec.linear_attention, at.factory
        name, hidden = f"{at.name}.{INSIDE}", at.spec.hidden_size
        sizes = Heads.of_rank(whole, factory)
        self._layer, self._eps = at.layer, at.spec.layers.norm_eps
        own = sizes.keys.count, sizes.values.count
        self._heads = DeltaHeads(*own, whole.key_dim, whole.value_dim)
        self._split = [sum(each.count for each in sizes.channels), sizes.of_values.count]
        self.inputs = Inputs(name, hidden, sizes, factory, by_key_head=by_key_head)
        names, orders = ["in_proj_b", "in_proj_a"], []
        outputs: list[Cut | list[Cut]] = [sizes.values, sizes.values]
        if by_key_head:
            names, outputs = ["in_proj_ba"], [[sizes.values, sizes.values]]
            orders = [rows_of_key_heads((whole.value_heads,) * 2, whole.key_heads)]
        modules = [f"{name}.{each}" for each in names]
        self.gates = PlainLinear(modules, hidden, outputs, factory, orders=orders)
        self.rule = DeltaRule(name, sizes, factory)
        self.output = Linear([f"{name}.out_proj"], sizes.of_values, [hidden], factory)

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        backend, rule, heads = step.backend, self.rule, self._heads
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
    """Return the row order that ungroups a projection whose parts are stored key head by key head,
    int64 [sum of sizes]. The parts then follow each other. sizes: rows of each part."""
    each = [size // key_heads for size in sizes]
    rows_KM = torch.arange(sum(sizes)).view(key_heads, -1)
    return torch.cat([part.flatten() for part in rows_KM.split(each, dim=1)])
