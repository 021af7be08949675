"""Qwen 3 with a mixture of experts."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, DecoderOptions
from quire.models.layers import Place
from quire.models.options import expert_options


class Qwen3Moe(Decoder):
    """As Qwen 3; the feed-forward layers, or some of them, are mixtures of experts."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        bias, experts = bool(spec.raw.get("attention_bias", False)), expert_options(spec)
        options = DecoderOptions(bias, bias, qk_norm=True, experts=experts)
        super().__init__(spec, options, place)
