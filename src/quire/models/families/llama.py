"""Llama 1 to 3."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Llama(Decoder):
    """A Llama decoder. The config says which layers have biases."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias, mlp_bias = spec.layers.attention_bias, spec.layers.mlp_bias
        options = DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
        super().__init__(spec, options, factory)
