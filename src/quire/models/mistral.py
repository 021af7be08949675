"""Mistral. Its sliding window is `ModelSpec.layer_windows`, which the attention backend applies."""

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions


class Mistral(Decoder):
    """No biases."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(), factory)
