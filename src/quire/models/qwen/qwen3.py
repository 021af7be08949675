"""Qwen 3 (dense)."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Qwen3(Decoder):
    """A Qwen 3 decoder, which normalises query and key heads before rotation."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        super().__init__(
            spec, DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm=True), factory
        )
