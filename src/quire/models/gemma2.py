"""Gemma 2: norms before and after attention and feed-forward layer, windows in turn, soft caps.

Shape legend: T tokens, D model dim.
"""

import torch
from torch import nn

from quire.base.config_fields import Fields
from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, DecoderAttention, LayerPlace, feed_forward, norm_of
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions
from quire.ops.attention.base import AttentionBackend


class Gemma2Layer(nn.Module):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.attention_norm = norm_of(at, "input_layernorm")
        self.attention = DecoderAttention(at)
        self.after_attention = norm_of(at, "post_attention_layernorm")
        self.mlp_norm = norm_of(at, "pre_feedforward_layernorm")
        self.mlp = feed_forward(at)
        self.after_mlp = norm_of(at, "post_feedforward_layernorm")

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotary_rows: torch.Tensor | None,
        backend: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        x_TD = self.after_attention(self.attention(x_TD, rotary_rows, backend))[0]
        x_TD, residual_TD = self.mlp_norm(x_TD, residual_TD)
        return self.after_mlp(self.mlp(x_TD))[0], residual_TD


class Gemma2(Decoder):
    """Rotary attention whose scores are capped, and logits that are."""

    layer_kind = Gemma2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        fields, bias = spec.fields, spec.layers.attention_bias
        refuse_bidirectional(fields)
        options = DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            norm_offset=1.0,
            activation=fields.text("hidden_activation", "gelu_pytorch_tanh"),
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            soft_cap=optional(fields, "attn_logit_softcapping"),
            embedding_scale=embedding_scale(spec, factory.dtype),
            logits_soft_cap=optional(fields, "final_logit_softcapping"),
        )
        super().__init__(spec, options, factory)


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Return sqrt(D), rounded to the model's dtype as Gemma was trained."""
    return float(torch.tensor(spec.hidden_size**0.5, dtype=torch.float64).to(dtype))


def refuse_bidirectional(fields: Fields) -> None:
    """Raise ModelError for a model whose tokens see those after them."""
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "only causal attention is supported")


def optional(fields: Fields, name: str) -> float | None:
    """Read a number that null turns off."""
    return fields.number(name) if fields.has(name) else None
