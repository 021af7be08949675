"""Mistral, and Mixtral, whose feed-forward layers are mixtures of experts.

The sliding window is `ModelSpec.layer_windows`, which the attention backend applies.
"""

from torch import nn

from quire.models.parts.decoder import Decoder, DecoderLayer, LayerPlace
from quire.models.parts.experts import ExpertForm, SparseMLP
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.spec.model_spec import ModelSpec


class Mistral(Decoder):
    """A Mistral decoder, without biases."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(), factory)


HUB, TRANSFORMERS = ".block_sparse_moe.", ".mlp."  # names of its feed-forward layer
FORM = ExpertForm(parts=("w1", "w3", "w2"))


class MixtralLayer(DecoderLayer):
    """A layer with a mixture of experts, as all layers have."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        assert at.options.experts is not None
        name = f"{at.name}{HUB}".removesuffix(".")
        return SparseMLP(name, at.spec, at.options.experts, at.factory, FORM)


class Mixtral(Decoder):
    """A whole Mixtral model. Files come from the hub, or from transformers 5, which stores the
    experts of a layer in one tensor."""

    layer_kind = MixtralLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(experts=spec.experts), factory)

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model."""
        return super().names_of(name.replace(TRANSFORMERS, HUB))
