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
    """No biases."""

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(), factory)


HUB, TRANSFORMERS = ".block_sparse_moe.", ".mlp."  # what the layer is called
FORM = ExpertForm(parts=("w1", "w3", "w2"))


class MixtralLayer(DecoderLayer):
    """All layers have experts."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        assert at.options.experts is not None
        name = f"{at.name}{HUB}".removesuffix(".")
        return SparseMLP(name, at.spec, at.options.experts, at.factory, FORM)


class Mixtral(Decoder):
    """A whole model, from files that the hub has, or that transformers 5 wrote with the experts of
    a layer in one tensor."""

    layer_kind = MixtralLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, DecoderOptions(experts=spec.experts), factory)

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model."""
        return super().names_of(name.replace(TRANSFORMERS, HUB))
