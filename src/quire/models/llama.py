"""Llama 1 to 3."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, DecoderOptions
from quire.models.layers import Place


class Llama(Decoder):
    """Biases only where the config asks for them."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        attention_bias = bool(spec.raw.get("attention_bias", False))
        mlp_bias = bool(spec.raw.get("mlp_bias", False))
        options = DecoderOptions(
            qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=mlp_bias
        )
        super().__init__(spec, options, place)
