"""ModernBERT: a bidirectional encoder with rotary embeddings and gated feed-forward layers.

Attention and feed-forward have a norm before each, except the first attention, which follows the
norm of the embeddings. Most layers attend within a window on both sides. Every third layer attends
to all tokens, with lower rotary frequencies.

Shape legend: T tokens, D model dim.
"""

from typing import Any

import torch
from torch import nn

from quire.models.parts.decoder import Decoder, DecoderAttention, GatedMLP, LayerPlace, LayerStep
from quire.models.parts.layers import LayerNorm, ParamFactory, StreamNorm
from quire.models.parts.options import DecoderOptions
from quire.spec.config_fields import Fields
from quire.spec.layer_windows import FULL, SLIDING
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import MIN_FACTOR, RopeOptions, rope_of

# By kind of layer: the default base of its rotary embedding, and its name in old configs.
THETAS = {FULL: (160_000.0, "global_rope_theta"), SLIDING: (10_000.0, "local_rope_theta")}
# Suffixes of tensors that hidden states do not depend on.
UNUSED = (
    "head.dense.weight",
    "head.dense.bias",
    "head.norm.weight",
    "head.norm.bias",
    "classifier.weight",
    "classifier.bias",
    "decoder.weight",
    "decoder.bias",
)


class ModernBertLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it, except the first attention."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.attention_norm = None
        if at.layer > 0:
            self.attention_norm = _norm(f"{at.name}.attn_norm", at.spec, at.factory)
        self.attention = DecoderAttention(at, ("Wqkv", "Wo"), "attn")
        self.mlp_norm = _norm(f"{at.name}.mlp_norm", at.spec, at.factory)
        self.mlp = GatedMLP(at, ("Wi", "Wo"))

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        if self.attention_norm is None:
            residual_TD = x_TD
        else:
            x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        x_TD = self.attention(x_TD, step)
        x_TD, residual_TD = self.mlp_norm(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class ModernBert(Decoder):
    """An encoder from token ids to hidden states, without a language model head."""

    layer_kind = ModernBertLayer
    embedding_name, norm_name = "embeddings.tok_embeddings", "final_norm"
    ignored_tensors = UNUSED

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        options = DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=spec.layers.mlp_bias,
            ropes=[
                modernbert_rope(spec, FULL if window is None else SLIDING)
                for window in spec.layer_windows
            ],
        )
        super().__init__(spec, options, factory)
        self.head = None
        self.embedding_norm = _norm(f"{self.base_prefix}embeddings.norm", spec, factory)

    def make_norm(self, spec: ModelSpec, factory: ParamFactory) -> nn.Module:
        """See Decoder."""
        return _norm(f"{self.base_prefix}{self.norm_name}", spec, factory)

    def _begin(
        self,
        input_ids_T: torch.Tensor,
        inputs_embeds_TD: torch.Tensor | None,
        intermediate_TE: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the normalised embeddings, which no norm follows in the first layer."""
        x_TD, _ = super()._begin(input_ids_T, inputs_embeds_TD, intermediate_TE)
        return self.embedding_norm(x_TD)[0], None


def _norm(name: str, spec: ModelSpec, factory: ParamFactory) -> StreamNorm:
    has_bias = spec.fields.flag("norm_bias")
    norm = LayerNorm(name, spec.hidden_size, spec.layers.norm_eps, factory, has_bias=has_bias)
    return StreamNorm(norm)


def modernbert_rope(spec: ModelSpec, kind: str) -> RopeOptions:
    """Read the rotary embedding of one kind of layers. Raises ModelError."""
    fields, (theta, old_name) = spec.fields, THETAS[kind]
    every = fields.inner("rope_parameters") or Fields({})
    for name in every.names():
        if name not in THETAS:
            raise every.error(name, f"it must stand under {FULL} or {SLIDING}")
    found = every.inner(kind) or Fields({})
    own: dict[str, Any] = {"rope_theta": fields.number(old_name, theta, MIN_FACTOR)}
    own |= {name: found.value(name) for name in found.names()}
    changes = fields.inner("rope_scaling") or Fields({})
    own |= {name: changes.value(name) for name in changes.names()}
    inner = Fields(own, f"config.json: rotary embedding of {kind}")
    return rope_of(inner, inner, spec.head_dim, spec.max_position)
