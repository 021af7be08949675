"""gpt-oss: attention sinks, alternating windows, MXFP4 experts with biases and clamped gates."""

from torch import nn

from quire.models.parts.decoder import Decoder, DecoderLayer, LayerPlace
from quire.models.parts.experts import ExpertForm, SparseMLP
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import ClampedGate
from quire.spec.config_fields import Fields
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import RopeOptions, rope_of

# The defaults of transformers for a config without a rotary embedding.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssLayer(DecoderLayer):
    """A layer with experts, as all layers have. Their rows of gate and up alternate."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        fields, experts = at.spec.fields, at.options.experts
        assert experts is not None
        form = ExpertForm(
            router="router",
            stand_alone=False,
            is_turned=True,
            takes_turns=True,
            has_bias=True,
            clamped=ClampedGate(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
        )
        return SparseMLP(f"{at.name}.mlp", at.spec, experts, at.factory, form)


class GptOss(Decoder):
    """A whole gpt-oss model."""

    layer_kind = GptOssLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(
            bias, bias, experts=spec.experts, ropes=[_rope(spec)] * spec.num_layers, has_sinks=True
        )
        super().__init__(spec, options, factory)


def _rope(spec: ModelSpec) -> RopeOptions:
    fields = spec.fields
    if fields.has("rope_scaling") or fields.has("rope_parameters"):
        return spec.rope
    return rope_of(Fields(ROPE), fields, spec.head_dim, spec.max_position)
