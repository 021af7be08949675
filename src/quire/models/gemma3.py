"""Gemma 3: Gemma 2 without caps of scores, with norms of heads, and with two rotary embeddings, one
for layers with a window and one for those without."""

from typing import Any

from quire.base.config_fields import Fields
from quire.base.layer_windows import FULL, SLIDING
from quire.base.model_spec import ModelSpec
from quire.base.rope_options import LEAST_FACTOR, RopeOptions, rope_of
from quire.models.decoder import Decoder
from quire.models.gemma2 import Gemma2Layer, embedding_scale, optional, refuse_bidirectional
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


class Gemma3(Decoder):
    """The text model (`gemma3_text`); see `multimodal/gemma3.py` for the one that reads images."""

    layer_kind = Gemma2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, gemma3_options(spec, factory), factory)


def gemma3_options(spec: ModelSpec, factory: ParamFactory) -> DecoderOptions:
    """Return what a Gemma 3 decoder does apart from others. Raises ModelError."""
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
    theta = fields.number("rope_theta", GLOBAL_THETA, LEAST_FACTOR)
    return _rope(spec, FULL, {"rope_theta": theta}, changes)


def rope_of_windows(spec: ModelSpec) -> RopeOptions:
    """Read that of layers with one. Old configs have its base in `rope_local_base_freq`."""
    theta = spec.fields.number("rope_local_base_freq", LOCAL_THETA, LEAST_FACTOR)
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
