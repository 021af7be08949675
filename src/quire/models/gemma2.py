"""Gemma 2: norms before and after attention and feed-forward layer, windows in turn, soft caps."""

import torch

from quire.base.config_fields import Fields
from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, SandwichLayer
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions


class Gemma2Layer(SandwichLayer):
    """What checkpoints call its norms."""

    after_attention = "post_attention_layernorm"
    before_mlp = "pre_feedforward_layernorm"
    after_mlp = "post_feedforward_layernorm"


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
