"""SmolLM 3: Llama in which some layers have no rotary embedding."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.layer_windows import rotated_layers
from quire.spec.model_spec import ModelSpec


class SmolLM3(Decoder):
    """A SmolLM 3 decoder. By default, every fourth layer has no rotary embedding."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        layers, turns = spec.layers, rotated_layers(spec.fields, spec.num_layers)
        options = DecoderOptions(
            qkv_bias=layers.attention_bias,
            output_bias=layers.attention_bias,
            mlp_bias=layers.mlp_bias,
            ropes=[spec.rope if each else None for each in turns],
        )
        super().__init__(spec, options, factory)
