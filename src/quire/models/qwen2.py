"""Qwen 2 and 2.5 (dense)."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions


class Qwen2(Decoder):
    """Queries, keys and values have biases."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(qkv_bias=True), factory)
