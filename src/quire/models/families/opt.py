"""OPT: learned positions, ReLU, biases. opt-350m has norms after each part, and projections.

Shape legend: T tokens, R rows, D model dim, W embedding dim, V vocabulary, N heads, H head dim.
"""

import torch
from torch import nn

from quire.models.checkpoint.kv_scales import NAME_ENDS
from quire.models.model import HEADS, PositionedAttention, PositionedModel
from quire.models.parts.layers import (
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    ParamFactory,
    activation,
)
from quire.ops.attention.base import AttentionBackend
from quire.ops.elementwise import add
from quire.spec.model_spec import ModelSpec

POSITION_OFFSET = 2  # the first rows of the position table stand for padding


def _attention(
    spec: ModelSpec, layer: int, name: str, factory: ParamFactory
) -> PositionedAttention:
    size, bias = spec.hidden_size, spec.opt.has_biases
    parts = [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"]
    heads, head_dim = factory.place.cut(spec.num_heads, HEADS), spec.head_dim
    part = heads.times(head_dim)
    qkv = Linear(parts, size, [part] * 3, factory, bias=bias)
    output = Linear([f"{name}.out_proj"], part, [size], factory, bias=bias)
    return PositionedAttention(heads, head_dim, layer, qkv, output, head_dim**-0.5)


class OPTLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it (or after it, in opt-350m)."""

    def __init__(self, spec: ModelSpec, layer: int, factory: ParamFactory) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.layers.norm_eps
        inner = factory.place.cut(spec.intermediate_size, "ffn_dim")
        name = f"model.decoder.layers.{layer}"
        bias, affine = spec.opt.has_biases, spec.opt.has_affine_norms
        self._norm_before = spec.opt.norms_first
        self._activation = activation(spec.layers.activation)
        self.attention = _attention(spec, layer, f"{name}.self_attn", factory)
        self.attention_norm = LayerNorm(f"{name}.self_attn_layer_norm", size, eps, factory, affine)
        self.up = Linear([f"{name}.fc1"], size, [inner], factory, bias=bias)
        self.down = Linear([f"{name}.fc2"], inner, [size], factory, bias=bias)
        self.mlp_norm = LayerNorm(f"{name}.final_layer_norm", size, eps, factory, affine)

    def forward(self, x_TD: torch.Tensor, backend: AttentionBackend) -> torch.Tensor:
        if self._norm_before:
            x_TD = add(x_TD, self.attention(self.attention_norm(x_TD), backend))
            return add(x_TD, self._feed_forward(self.mlp_norm(x_TD)))
        x_TD = self.attention_norm(add(x_TD, self.attention(x_TD, backend)))
        out_TD: torch.Tensor = self.mlp_norm(add(x_TD, self._feed_forward(x_TD)))
        return out_TD

    def _feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out_TD: torch.Tensor = self.down(self._activation(self.up(x_TD)))
        return out_TD


class OPT(PositionedModel):
    """A whole OPT model."""

    base_prefix = "model."
    ignored_tensors = NAME_ENDS

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__()
        options, size, name = spec.opt, spec.hidden_size, "model.decoder"
        width, place = options.width, factory.place
        self.set_stage(
            factory,
            [f"{name}.layers.{layer}" for layer in range(spec.num_layers)],
            [f"{name}.{each}" for each in ("embed_tokens", "embed_positions", "project_in")],
            [f"{name}.final_layer_norm", f"{name}.project_out", "lm_head"],
            size,
        )
        self.embedding = self.positions = self.head = None
        if place.has_table(is_tied=spec.tie_embeddings):
            vocabulary = place.vocabulary(spec.vocab_size)
            self.embedding = Embedding(f"{name}.embed_tokens", vocabulary, width, factory)
        if place.is_first:
            self.positions = Embedding(
                f"{name}.embed_positions", spec.max_position, size, factory, POSITION_OFFSET
            )
            if width != size:
                self.project_in = Linear([f"{name}.project_in"], width, [size], factory)
        self.layers = nn.ModuleList(
            OPTLayer(spec, layer, factory) for layer in place.layers(spec.num_layers)
        )
        if place.is_last:
            self._end(spec, name, factory)

    def _end(self, spec: ModelSpec, name: str, factory: ParamFactory) -> None:
        """Build the modules after the layers."""
        options, size = spec.opt, spec.hidden_size
        if options.width != size:
            self.project_out = Linear([f"{name}.project_out"], size, [options.width], factory)
        if options.has_final_norm:
            eps, affine = spec.layers.norm_eps, options.has_affine_norms
            self.norm = LayerNorm(f"{name}.final_layer_norm", size, eps, factory, affine)
        tied = self.embedding if spec.tie_embeddings else None
        vocabulary = factory.place.vocabulary(spec.vocab_size)
        self.head = LMHead("lm_head", vocabulary, options.width, factory, tied)
