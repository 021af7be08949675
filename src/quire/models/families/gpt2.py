"""GPT-2: learned positions, norms before, weights stored as [inputs, outputs].

Shape legend: T tokens, R rows, D model dim, V vocabulary, N heads, H head dim.
"""

import torch
from torch import nn

from quire.models.model import HEADS, PositionedAttention, PositionedModel
from quire.models.parts.layers import (
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    ParamFactory,
    activation,
)
from quire.ops.attention.base import AttentionBackend
from quire.ops.elementwise import add
from quire.spec.cuts import Cut
from quire.spec.model_spec import ModelSpec


def _linear(
    name: str, inputs: int | Cut, outputs: int | Cut | list[Cut], factory: ParamFactory
) -> Linear:
    return Linear([name], inputs, [outputs], factory, bias=True, transposed=True)


def _attention(
    spec: ModelSpec, layer: int, name: str, factory: ParamFactory
) -> PositionedAttention:
    size, scale = spec.hidden_size, spec.head_dim**-0.5 if spec.gpt2.scales_attention else 1.0
    if spec.gpt2.scales_by_layer:
        scale /= layer + 1
    heads = factory.place.cut(spec.num_heads, HEADS)
    part = heads.times(spec.head_dim)
    qkv = _linear(f"{name}.c_attn", size, [part, part, part], factory)
    output = _linear(f"{name}.c_proj", part, size, factory)
    return PositionedAttention(heads, spec.head_dim, layer, qkv, output, scale)


class GPT2Layer(nn.Module):
    """Attention and feed-forward, each with a norm before it."""

    def __init__(self, spec: ModelSpec, layer: int, eps: float, factory: ParamFactory) -> None:
        super().__init__()
        size, name = spec.hidden_size, f"transformer.h.{layer}"
        inner = factory.place.cut(spec.intermediate_size, "n_inner")
        self.attention_norm = LayerNorm(f"{name}.ln_1", size, eps, factory)
        self.attention = _attention(spec, layer, f"{name}.attn", factory)
        self.mlp_norm = LayerNorm(f"{name}.ln_2", size, eps, factory)
        self.up = _linear(f"{name}.mlp.c_fc", size, inner, factory)
        self.down = _linear(f"{name}.mlp.c_proj", inner, size, factory)
        self._activation = activation(spec.layers.activation)

    def forward(self, x_TD: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        x_TD = add(x_TD, self.attention(self.attention_norm(x_TD), backend))
        inner_TF = self._activation(self.up(self.mlp_norm(x_TD)))
        return add(x_TD, self.down(inner_TF))


class GPT2(PositionedModel):
    """A whole GPT-2 model."""

    base_prefix = "transformer."
    ignored_tensors = (".attn.bias", ".attn.masked_bias")  # constants: the causal mask

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        size, eps, place = spec.hidden_size, spec.layers.norm_eps, factory.place
        names = [f"transformer.h.{layer}" for layer in range(spec.num_layers)]
        before, after = ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")
        self.set_stage(factory, names, before, after, size)
        vocabulary = place.vocabulary(spec.vocab_size)
        self.embedding = self.positions = self.head = None
        if place.has_table(is_tied=spec.tie_embeddings):
            self.embedding = Embedding(before[0], vocabulary, size, factory)
        if place.is_first:
            self.positions = Embedding(before[1], spec.max_position, size, factory)
        self.layers = nn.ModuleList(
            GPT2Layer(spec, layer, eps, factory) for layer in place.layers(spec.num_layers)
        )
        if place.is_last:
            self.norm = LayerNorm(after[0], size, eps, factory)
            tied = self.embedding if spec.tie_embeddings else None
            self.head = LMHead(after[1], vocabulary, size, factory, tied)
