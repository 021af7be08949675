"""Granite: Llama whose embeddings, scores, residual additions and logits have factors."""

import torch

from quire.models.parts.decoder import Decoder, DecoderLayer, LayerPlace, LayerStep
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import scale
from quire.spec.model_spec import ModelSpec


class GraniteLayer(DecoderLayer):
    """A layer that scales the outputs of attention and feed-forward before each addition."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        self._factor = at.spec.fields.number("residual_multiplier", 1.0)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        x_TD = scale(self.attention(x_TD, step), self._factor)
        x_TD, residual_TD = self.mlp_norm(x_TD, residual_TD)
        return scale(self.mlp(x_TD), self._factor), residual_TD


class Granite(Decoder):
    """A whole Granite model."""

    layer_kind = GraniteLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        fields, layers = spec.fields, spec.layers
        options = DecoderOptions(
            qkv_bias=layers.attention_bias,
            output_bias=layers.attention_bias,
            mlp_bias=layers.mlp_bias,
            attention_scale=fields.number("attention_multiplier", 1.0),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logits_scale=1.0 / fields.number("logits_scaling", 1.0),
        )
        super().__init__(spec, options, factory)
