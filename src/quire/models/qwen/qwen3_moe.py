"""Qwen 3 with a mixture of experts."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Qwen3Moe(Decoder):
    """Qwen 3 whose feed-forward layers, or some of them, are mixtures of experts."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(bias, bias, qk_norm=True, experts=spec.experts)
        super().__init__(spec, options, factory)
