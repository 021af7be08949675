"""OPT: learned positions, ReLU, biases everywhere (opt-350m: norms after, and projections).

Shape legend: T tokens, R rows, D model dim, W embedding dim, V vocabulary, N heads, H head dim.
"""

import torch
from torch import nn

from quire.base.model_spec import ModelSpec
from quire.models.kv_scales import NAME_ENDS
from quire.models.layers import (
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    Place,
    activation,
)
from quire.models.model import PositionedAttention, PositionedModel
from quire.ops.add import add
from quire.ops.attention.base import AttentionBackend

POSITION_OFFSET = 2  # the first rows of the position table stand for padding


def _attention(spec: ModelSpec, layer: int, name: str, place: Place) -> PositionedAttention:
    size, bias = spec.hidden_size, spec.opt.has_biases
    parts = [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"]
    qkv = Linear(parts, size, [size] * 3, place, bias=bias)
    output = Linear([f"{name}.out_proj"], size, [size], place, bias=bias)
    return PositionedAttention(spec, layer, qkv, output, spec.head_dim**-0.5)


class OPTLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it (or after it, in opt-350m)."""

    def __init__(self, spec: ModelSpec, layer: int, place: Place) -> None:
        super().__init__()
        size, inner, eps = spec.hidden_size, spec.intermediate_size, spec.layers.norm_eps
        name = f"model.decoder.layers.{layer}"
        bias, affine = spec.opt.has_biases, spec.opt.has_affine_norms
        self._norm_before = spec.opt.norms_first
        self._activation = activation(spec.layers.activation)
        self.attention = _attention(spec, layer, f"{name}.self_attn", place)
        self.attention_norm = LayerNorm(f"{name}.self_attn_layer_norm", size, eps, place, affine)
        self.up = Linear([f"{name}.fc1"], size, [inner], place, bias=bias)
        self.down = Linear([f"{name}.fc2"], inner, [size], place, bias=bias)
        self.mlp_norm = LayerNorm(f"{name}.final_layer_norm", size, eps, place, affine)

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

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        super().__init__()
        options, size, name = spec.opt, spec.hidden_size, "model.decoder"
        width = options.width
        self.embedding = Embedding(f"{name}.embed_tokens", spec.vocab_size, width, place)
        self.positions = Embedding(
            f"{name}.embed_positions", spec.max_position, size, place, POSITION_OFFSET
        )
        if width != size:
            self.project_in = Linear([f"{name}.project_in"], width, [size], place)
            self.project_out = Linear([f"{name}.project_out"], size, [width], place)
        self.layers = nn.ModuleList(
            OPTLayer(spec, layer, place) for layer in range(spec.num_layers)
        )
        if options.has_final_norm:
            eps, affine = spec.layers.norm_eps, options.has_affine_norms
            self.norm = LayerNorm(f"{name}.final_layer_norm", size, eps, place, affine)
        tied = self.embedding if spec.tie_embeddings else None
        self.head = LMHead("lm_head", spec.vocab_size, width, place, tied)
