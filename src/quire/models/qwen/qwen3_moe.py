"""Qwen 3 with a mixture of experts."""

from quire.models.parts.decoder import Decoder
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Qwen3Moe(Decoder):
    """A Qwen 3 decoder in which all or some feed-forward layers are mixtures of experts."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(bias, bias, qk_norm=True, experts=spec.experts)
        super().__init__(spec, options, factory)
