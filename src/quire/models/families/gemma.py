"""Gemma 2: norms before and after attention and feed-forward, alternating windows, soft caps.

Gemma 3 has no soft cap on scores. It has norms of heads, and two rotary embeddings: one for layers
with a window and one for the other layers.
"""

from typing import Any

import torch

from quire.models.parts.decoder import Decoder, SandwichLayer
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.config_fields import Fields
from quire.spec.layer_windows import FULL, SLIDING
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import MIN_FACTOR, RopeOptions, rope_of


class Gemma2Layer(SandwichLayer):
    """A layer with Gemma's names of the four norms in checkpoints."""

    after_attention = "post_attention_layernorm"
    before_mlp = "pre_feedforward_layernorm"
    after_mlp = "post_feedforward_layernorm"


class Gemma2(Decoder):
    """A decoder with soft caps on attention scores and logits."""

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
    """Raise ModelError for a model with bidirectional attention."""
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "only causal attention is supported")


def optional(fields: Fields, name: str) -> float | None:
    """Return a number of the config; None if it is absent or null."""
    return fields.number(name) if fields.has(name) else None


GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


class Gemma3(Decoder):
    """The text model (`gemma3_text`); `multimodal/gemma3.py` has the model that reads images."""

    layer_kind = Gemma2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, gemma3_options(spec, factory), factory)


def gemma3_options(spec: ModelSpec, factory: ParamFactory) -> DecoderOptions:
    """Return the decoder options of Gemma 3. Raises ModelError for unsupported settings."""
    fields, bias = spec.fields, spec.layers.attention_bias
    refuse_bidirectional(fields)
    whole, local = rope_of_full(spec), rope_of_windows(spec)
    return DecoderOptions(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        ropes=[whole if window is None else local for window in spec.layer_windows],
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=embedding_scale(spec, factory.dtype),
        logits_soft_cap=optional(fields, "final_logit_softcapping"),
    )


def rope_of_full(spec: ModelSpec) -> RopeOptions:
    """Read the rotary embedding of layers without a window. Old configs scale it in `rope_scaling`,
    and have its base in `rope_theta`."""
    fields = spec.fields
    scaling = fields.inner("rope_scaling") or Fields({})
    if scaling.has("type") and not scaling.has("rope_type"):
        raise scaling.error("type", "transformers reads only rope_type here")
    changes = {name: scaling.value(name) for name in scaling.names()}
    theta = fields.number("rope_theta", GLOBAL_THETA, MIN_FACTOR)
    return _rope(spec, FULL, {"rope_theta": theta}, changes)


def rope_of_windows(spec: ModelSpec) -> RopeOptions:
    """Read the rotary embedding of layers with a window. Old configs have its base in
    `rope_local_base_freq`."""
    theta = spec.fields.number("rope_local_base_freq", LOCAL_THETA, MIN_FACTOR)
    return _rope(spec, SLIDING, {"rope_theta": theta}, {})


def _rope(
    spec: ModelSpec, kind: str, defaults: dict[str, Any], changes: dict[str, Any]
) -> RopeOptions:
    every = spec.fields.inner("rope_parameters") or Fields({})
    for name in every.names():
        if name not in (FULL, SLIDING):
            raise every.error(name, f"it must stand under {FULL} or {SLIDING}")
    found = every.inner(kind) or Fields({})
    own = defaults | {name: found.value(name) for name in found.names()} | changes
    fields = Fields(own, f"config.json: rotary embedding of {kind}")
    for holder in (fields, spec.fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "all of each head is turned here")
    return rope_of(fields, fields, spec.head_dim, spec.max_position)
