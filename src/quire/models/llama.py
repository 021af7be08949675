"""Llama 1 to 3."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions


class Llama(Decoder):
    """Biases only where the config asks for them."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias, mlp_bias = spec.layers.attention_bias, spec.layers.mlp_bias
        options = DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
        super().__init__(spec, options, factory)
