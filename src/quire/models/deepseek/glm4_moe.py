"""GLM 4.5 and 4.6: grouped-query attention, with DeepSeek V3's mixtures of experts."""

from quire.models.deepseek.deepseek import SharedExpertsDecoder, SharedExpertsLayer
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import rope_options


class Glm4Moe(SharedExpertsDecoder):
    """A whole model. Only queries, keys and values may have biases."""

    layer_kind = SharedExpertsLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, glm4_moe_options(spec), factory)


def glm4_moe_options(spec: ModelSpec) -> DecoderOptions:
    """Return the decoder options of the model."""
    rope = rope_options(spec.fields, spec.head_dim, spec.max_position, default_part=0.5)
    return DecoderOptions(
        qkv_bias=spec.layers.attention_bias,
        qk_norm=spec.fields.flag("use_qk_norm"),
        experts=spec.experts,
        ropes=[rope] * spec.num_layers,
    )
