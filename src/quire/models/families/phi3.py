"""Phi 3 and 4, mini and medium: fused projections, and rotary embeddings for long contexts.

Its longrope has two sets of divisors, and an engine uses one set for all prompts. It uses the set
for long contexts if `max_model_len` exceeds `original_max_position_embeddings`
(ModelSpec.served_up_to).
"""

from torch import nn

from quire.models.parts.decoder import Decoder, DecoderAttention, DecoderLayer, GatedMLP, LayerPlace
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import (
    RopeOptions,
    longrope_options,
    own_fields,
    rope_kind,
    rope_options,
    rotated_dims,
)

LONGROPES = ("longrope", "su", "yarn")  # the last two are old names of longrope in these configs


class Phi3Layer(DecoderLayer):
    """A layer whose checkpoints fuse queries, keys and values, and fuse gate and up."""

    def make_attention(self, at: LayerPlace) -> nn.Module:
        return DecoderAttention(at, ("qkv_proj", "o_proj"))

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        return GatedMLP(at, ("gate_up_proj", "down_proj"))


class Phi3(Decoder):
    """A Phi 3 or Phi 4 decoder, without biases."""

    layer_kind = Phi3Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        options = DecoderOptions(ropes=[phi3_rope(spec)] * spec.num_layers)
        super().__init__(spec, options, factory)


def phi3_rope(spec: ModelSpec) -> RopeOptions:
    """Read the rotary embedding, which may rotate only a part of each head. Raises ModelError."""
    fields = spec.fields
    own, kind = own_fields(fields), rope_kind(own_fields(fields))
    if kind in LONGROPES:
        holder = own if own.has("partial_rotary_factor") else fields
        rotated = rotated_dims(holder, "partial_rotary_factor", spec.head_dim)
        return longrope_options(own, fields, rotated, spec.max_position, is_long=spec.is_long)
    if kind != "default":
        name = "rope_type" if own.has("rope_type") else "type"
        raise own.error(name, "phi3 has default and longrope")
    return rope_options(fields, spec.head_dim, spec.max_position, default_part=1.0)
