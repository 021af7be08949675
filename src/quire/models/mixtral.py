"""Mixtral: Mistral whose feed-forward layers are mixtures of experts."""

from torch import nn

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, DecoderLayer, LayerPlace
from quire.models.experts import ExpertForm, SparseMLP
from quire.models.layers import ParamFactory
from quire.models.options import DecoderOptions

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
