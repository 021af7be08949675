"""Qwen 2 and 2.5 (dense)."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Qwen2(Decoder):
    """A Qwen 2 decoder, with biases on queries, keys and values."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(qkv_bias=True), factory)
