"""Qwen 3 (dense)."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions


class Qwen3(Decoder):
    """Query and key heads are normalised before they are rotated."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        super().__init__(
            spec, DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm=True), factory
        )
