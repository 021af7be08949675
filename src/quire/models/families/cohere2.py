"""Cohere 2 (Command R7B, Aya): attention and feed-forward layer in parallel after one layer norm.
Only layers with a window have RoPE, which rotates neighbouring dimensions as pairs.

Shape legend: T tokens, D model dim.
"""

import torch
from torch import nn

from quire.models.parts.decoder import (
    Decoder,
    DecoderAttention,
    LayerPlace,
    LayerStep,
    feed_forward,
)
from quire.models.parts.layers import LayerNorm, ParamFactory, StreamNorm
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import add
from quire.spec.model_spec import ModelSpec


class Cohere2Layer(nn.Module):
    """A layer whose attention and feed-forward layer read the output of the same norm."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.norm = _norm(f"{at.name}.input_layernorm", at.spec, at.factory)
        self.attention = DecoderAttention(at)
        self.mlp = feed_forward(at)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD, residual_TD = self.norm(x_TD, residual_TD)
        return add(self.attention(x_TD, step), self.mlp(x_TD)), residual_TD


class Cohere2(Decoder):
    """A whole Cohere 2 model."""

    layer_kind = Cohere2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            interleaved=True,
            ropes=[None if window is None else spec.rope for window in spec.layer_windows],
            logits_scale=spec.fields.number("logit_scale"),
        )
        super().__init__(spec, options, factory)

    def make_norm(self, spec: ModelSpec, factory: ParamFactory) -> nn.Module:
        """See Decoder."""
        return _norm("model.norm", spec, factory)


def _norm(name: str, spec: ModelSpec, factory: ParamFactory) -> StreamNorm:
    eps = spec.fields.number("layer_norm_eps", above=False)
    return StreamNorm(LayerNorm(name, spec.hidden_size, eps, factory, has_bias=False))
