"""DeepSeek V2 (also Lite) and V3 (also R1, V3.1 and Kimi K2): latent attention, and mixtures of
experts with shared experts. `models/mtp.py` has V3's layer for multi-token prediction."""

import re

import torch
from torch import nn

from quire.models.parts.decoder import Decoder, DecoderLayer, GatedMLP, LayerPlace, feed_forward
from quire.models.parts.latent_attention import LatentAttentionLayer
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import add
from quire.spec.model_options import INNER_SIZE
from quire.spec.model_spec import ModelSpec

LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class SharedExperts(nn.Module):
    """The output of a mixture of experts plus that of the shared experts, which are one
    feed-forward layer."""

    def __init__(self, at: LayerPlace, shared_size: int) -> None:
        super().__init__()
        self.sparse = feed_forward(at)
        self.shared = GatedMLP(
            at, inside="mlp.shared_experts", inner=shared_size, setting=INNER_SIZE
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return add(self.sparse(x_TD), self.shared(x_TD))


class SharedExpertsLayer(DecoderLayer):
    """A layer with experts and shared experts, or with a dense feed-forward layer."""

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        experts = at.options.experts
        if experts is not None and experts.is_sparse(at.layer):
            return SharedExperts(at, experts.shared_size)
        return feed_forward(at)


class DeepseekLayer(SharedExpertsLayer):
    """A layer with latent attention."""

    def make_attention(self, at: LayerPlace) -> nn.Module:
        return LatentAttentionLayer(at, has_bias=at.options.qkv_bias)


class SharedExpertsDecoder(Decoder):
    """A decoder whose checkpoints may hold more layers than the model has, for multi-token
    prediction."""

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__(spec, options, factory)
        self._num_layers = spec.num_layers

    def ignores(self, name: str) -> bool:
        """See Model. Also ignore the layers for multi-token prediction."""
        found = LAYER.match(name)
        is_later = found is not None and int(found[1]) >= self._num_layers
        return is_later or super().ignores(name)


class Deepseek(SharedExpertsDecoder):
    """A whole model of DeepSeek V2 or V3, or of GLM 4.7 Flash."""

    layer_kind = DeepseekLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, deepseek_options(spec), factory)


def deepseek_options(spec: ModelSpec) -> DecoderOptions:
    """Return the decoder options of DeepSeek's models and GLM 4.7 Flash."""
    layers = spec.layers
    has_bias = spec.model_type == "deepseek_v2" and layers.mlp_bias
    return DecoderOptions(qkv_bias=layers.attention_bias, mlp_bias=has_bias, experts=spec.experts)
