"""MiniCPM 3: latent attention in a dense decoder whose embeddings, residual additions and logits
have factors."""

from torch import nn

from quire.models.families.granite import GraniteLayer
from quire.models.parts.decoder import Decoder, LayerPlace
from quire.models.parts.latent_attention import LatentAttentionLayer
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import RopeOptions, longrope_options, own_fields, rope_kind


class MiniCPM3Layer(GraniteLayer):
    """A layer with latent attention that scales both outputs before each addition."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        layers = at.spec.num_layers
        self._factor = at.spec.fields.number("scale_depth", layers**0.5) / layers**0.5

    def make_attention(self, at: LayerPlace) -> nn.Module:
        return LatentAttentionLayer(at, has_bias=at.options.qkv_bias)


class MiniCPM3(Decoder):
    """A whole MiniCPM 3 model."""

    layer_kind = MiniCPM3Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        fields, layers = spec.fields, spec.layers
        base = fields.number("dim_model_base", float(spec.hidden_size))
        options = DecoderOptions(
            qkv_bias=layers.attention_bias,
            mlp_bias=layers.mlp_bias,
            ropes=[minicpm3_rope(spec)] * spec.num_layers,
            embedding_scale=fields.number("scale_emb", 1.0),
            logits_scale=base / spec.hidden_size,
        )
        super().__init__(spec, options, factory)


def minicpm3_rope(spec: ModelSpec) -> RopeOptions:
    """Read the rotary embedding, usually of type longrope. Raises ModelError."""
    fields = spec.fields
    own = own_fields(fields)
    if rope_kind(own) != "longrope":
        return spec.rope
    size, is_long = spec.rotary_dim, spec.is_long
    return longrope_options(own, fields, size, spec.max_position, is_long=is_long)
