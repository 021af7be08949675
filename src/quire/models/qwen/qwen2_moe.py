"""Qwen 2 with a mixture of experts, and with a shared expert that every token uses.

Shape legend: T tokens, D model dim.
"""

import torch
from torch import nn

from quire.models.parts.decoder import Decoder, DecoderLayer, GatedMLP, LayerPlace, feed_forward
from quire.models.parts.experts import Router
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import gated_add
from quire.spec.model_options import SHARED_SIZE
from quire.spec.model_spec import ModelSpec


class SharedMLP(nn.Module):
    """The output of a mixture of experts plus the gated output of the shared expert."""

    def __init__(self, at: LayerPlace, shared_size: int) -> None:
        super().__init__()
        self.sparse = feed_forward(at)
        self.shared = GatedMLP(
            at, inside="mlp.shared_expert", inner=shared_size, setting=SHARED_SIZE
        )
        name = f"{at.name}.mlp.shared_expert_gate"
        self.gate = Router(name, at.spec.hidden_size, 1, at.factory)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return gated_add(self.sparse(x_TD), self.shared(x_TD), self.gate(x_TD))


class Qwen2MoeLayer(DecoderLayer):
    """A layer with experts, or with a dense feed-forward layer if the config says so."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        experts = at.options.experts
        if experts is not None and experts.is_sparse(at.layer):
            return SharedMLP(at, experts.shared_size)
        return feed_forward(at)


class Qwen2Moe(Decoder):
    """A whole model, with experts in the layers that the config selects."""

    layer_kind = Qwen2MoeLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.fields.flag("qkv_bias", True)
        super().__init__(spec, DecoderOptions(qkv_bias=bias, experts=spec.experts), factory)
