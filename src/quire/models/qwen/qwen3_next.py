"""Qwen 3 Next: linear attention in three of four layers, and attention with a gated output in the
others. Feed-forward layers are mixtures of experts with a shared expert.

Shape legend: T tokens, D model dim, N query heads, K KV heads, M = N + 2 K, H head dim.
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from quire.models.parts.decoder import (
    Decoder,
    LayerPlace,
    LayerStep,
    attention_output,
    head_norm,
    layer_rope,
)
from quire.models.parts.layers import Attention, Linear, ParamFactory
from quire.models.parts.linear_attention import Inputs, LinearAttentionLayer
from quire.models.parts.options import DecoderOptions
from quire.models.parts.rope import head_order, rows_of_heads
from quire.models.qwen.qwen2_moe import Qwen2MoeLayer
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import sigmoid_mul
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import rope_options


class GatedAttention(nn.Module):
    """Attention with normalised and partly rotated heads. The sigmoid of a gate per query
    dimension multiplies the output before the output projection.

    The rows of gates come first in the merged projection, so that queries, keys and values are
    adjacent. In checkpoints each head's gate follows its query.
    """

    def __init__(self, at: LayerPlace, inside: str = "self_attn") -> None:
        super().__init__()
        spec, options, layer, name, factory = at
        heads, kv_heads, size = at.heads, at.kv_heads, spec.head_dim
        self._heads, self._kv_heads, self._head_dim = heads.count, kv_heads.count, size
        rope = layer_rope(spec, options, layer)
        assert rope is not None, "keys are stored turned"
        order = head_order(size, rope.rotated, interleaved=False)
        name = f"{name}.{inside}"
        self.gate_qkv = Linear(
            [f"{name}.{each}" for each in ("q_proj", "k_proj", "v_proj")],
            spec.hidden_size,
            [[heads.times(size)] * 2, kv_heads.times(size), kv_heads.times(size)],
            factory,
            bias=options.qkv_bias,
            orders=[
                gates_first(heads.whole, size, order),
                rows_of_heads(order, kv_heads.whole),
                None,
            ],
        )
        self.norm = head_norm(at, name, order)
        self.output = attention_output(at, f"{name}.o_proj")
        self.attention = Attention(layer, Scores(size**-0.5))

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        rotary_rows, backend, _ = step
        assert rotary_rows is not None, "all layers of this kind turn queries and keys"
        heads, kv_heads, size = self._heads, self._kv_heads, self._head_dim
        all_heads = self.gate_qkv(x_TD).view(-1, 2 * (heads + kv_heads), size)
        gate_TNH, qkv_TMH = all_heads.split([heads, heads + 2 * kv_heads], dim=1)
        read_TM = self.attention.rotated(qkv_TMH, kv_heads, rotary_rows, self.norm, backend)
        out: torch.Tensor = self.output(sigmoid_mul(read_TM, gate_TNH.flatten(1)))
        return out


def gates_first(heads: int, size: int, order_H: torch.Tensor | None) -> torch.Tensor:
    """Return the row order of a projection stored as [query | gate] per head, int64 [2 N H].
    All gates come first, then all queries. order: permutation of a query head's dimensions."""
    queries_NH, gates_NH = torch.arange(2 * heads * size).view(heads, 2, size).unbind(1)
    if order_H is not None:
        queries_NH = queries_NH[:, order_H]
    return torch.cat((gates_NH.flatten(), queries_NH.flatten()))


MORE_TOKENS = "mtp."  # prefix of layers for multi-token prediction, which are not run


class Qwen3NextLayer(Qwen2MoeLayer):
    """A layer with linear attention or gated attention, as the config says."""

    by_key_head: ClassVar[bool] = True  # layout of linear attention (`Inputs`)

    def make_attention(self, at: LayerPlace) -> nn.Module:
        if at.layer in at.spec.linear_layers:
            return LinearAttentionLayer(at, by_key_head=self.by_key_head)
        return GatedAttention(at)


class Qwen3Next(Decoder):
    """A whole Qwen 3 Next model."""

    layer_kind = Qwen3NextLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, hybrid_options(spec), factory)

    def adopt(self, names: Iterable[str]) -> None:
        """See Model. Detect the layout of the inputs of linear attention, too."""
        names = list(names)
        super().adopt(names)
        stored = {own for name in names for own in self.names_of(name)}
        for module in self.modules():
            if isinstance(module, Inputs):
                module.adopt(stored)

    def ignores(self, name: str) -> bool:
        """See Model. Also ignore the layers for multi-token prediction."""
        return name.startswith(MORE_TOKENS) or super().ignores(name)


def hybrid_options(spec: ModelSpec) -> DecoderOptions:
    """Return the decoder options that Qwen 3 Next and Qwen 3.5 share."""
    bias = spec.layers.attention_bias
    rope = rope_options(spec.fields, spec.head_dim, spec.max_position, default_part=0.25)
    layers = range(spec.num_layers)
    return DecoderOptions(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=spec.experts,
        norm_offset=1.0,
        ropes=[None if layer in spec.linear_layers else rope for layer in layers],
    )
