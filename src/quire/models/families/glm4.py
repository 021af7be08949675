"""GLM 4: norms before and after attention and feed-forward, interleaved rotary embedding of a part
of each head, and one tensor for gate and up."""

from torch import nn

from quire.models.parts.decoder import Decoder, GatedMLP, LayerPlace, SandwichLayer
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import rope_options


class Glm4Layer(SandwichLayer):
    """A layer with norms before and after each part, and with gate and up in one tensor."""

    after_attention = "post_self_attn_layernorm"
    after_mlp = "post_mlp_layernorm"

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        return GatedMLP(at, ("gate_up_proj", "down_proj"))


class Glm4(Decoder):
    """Dense GLM 4 of 9 and 32 billion parameters. Only queries, keys and values may have biases."""

    layer_kind = Glm4Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        rope = rope_options(spec.fields, spec.head_dim, spec.max_position, default_part=0.5)
        bias, ropes = spec.layers.attention_bias, [rope] * spec.num_layers
        super().__init__(spec, DecoderOptions(bias, ropes=ropes, interleaved=True), factory)
