"""The decoder that Llama, Mistral and Qwen share: rotary attention and a gated feed-forward layer.

Shape legend: T tokens, R rows, D model dim, V vocabulary, N query heads, K KV heads, H head dim.

What differs between them is in `DecoderOptions`; each architecture's file says which it uses.
The residual stream is carried beside the hidden states, so that its addition is part of the norm.
"""

import torch
from torch import nn

from quire.base.model_options import check_activation
from quire.base.model_spec import ModelSpec
from quire.models.experts import SparseMLP
from quire.models.kv_scales import NAME_ENDS
from quire.models.layers import (
    Attention,
    Embedding,
    HeadNorm,
    Linear,
    LMHead,
    ParamFactory,
    RMSNorm,
)
from quire.models.model import Model
from quire.models.options import DecoderOptions
from quire.models.rope import Rotary
from quire.ops.attention.base import AttentionBackend
from quire.ops.silu_mul import silu_mul


class DecoderAttention(nn.Module):
    """Queries, keys and values, their rotation, attention and the output projection."""

    def __init__(
        self, spec: ModelSpec, layer: int, name: str, options: DecoderOptions, factory: ParamFactory
    ) -> None:
        super().__init__()
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._heads, self._kv_heads, self._head_dim = heads, kv_heads, size
        self.qkv = Linear(
            [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"],
            spec.hidden_size,
            [heads * size, kv_heads * size, kv_heads * size],
            factory,
            bias=options.qkv_bias,
        )
        self.qk_norm = None
        if options.qk_norm:
            names = (f"{name}.q_norm", f"{name}.k_norm")
            self.qk_norm = HeadNorm(names, (heads, kv_heads), size, spec.layers.norm_eps, factory)
        self.output = Linear(
            [f"{name}.o_proj"],
            heads * size,
            [spec.hidden_size],
            factory,
            bias=options.output_bias,
        )
        self.attention = Attention(layer, size**-0.5)

    def forward(
        self, x_TD: torch.Tensor, rotary_rows: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        heads, kv_heads = self._heads, self._kv_heads
        qkv_TMH = self.qkv(x_TD).view(-1, heads + 2 * kv_heads, self._head_dim)
        norm = self.qk_norm
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        layer = self.attention.layer
        q_TNH = backend.rotary_write(layer, qkv_TMH, kv_heads, rotary_rows, weight, eps)
        out: torch.Tensor = self.output(self.attention.stored(q_TNH, backend))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, spec: ModelSpec, name: str, options: DecoderOptions, factory: ParamFactory
    ) -> None:
        super().__init__()
        inner, bias = spec.intermediate_size, options.mlp_bias
        self.gate_up = Linear(
            [f"{name}.gate_proj", f"{name}.up_proj"],
            spec.hidden_size,
            [inner, inner],
            factory,
            bias=bias,
        )
        self.down = Linear([f"{name}.down_proj"], inner, [spec.hidden_size], factory, bias=bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(silu_mul(self.gate_up(x_TD)))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it."""

    def __init__(
        self, spec: ModelSpec, layer: int, options: DecoderOptions, factory: ParamFactory
    ) -> None:
        super().__init__()
        name, size, eps = f"model.layers.{layer}", spec.hidden_size, spec.layers.norm_eps
        self.attention_norm = RMSNorm(f"{name}.input_layernorm", size, eps, factory)
        self.attention = DecoderAttention(spec, layer, f"{name}.self_attn", options, factory)
        self.mlp_norm = RMSNorm(f"{name}.post_attention_layernorm", size, eps, factory)
        experts = options.experts
        self.mlp: nn.Module
        if experts is not None and experts.is_sparse(layer):
            self.mlp = SparseMLP(f"{name}.mlp", size, experts, factory)
        else:
            self.mlp = GatedMLP(spec, f"{name}.mlp", options, factory)

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotary_rows: torch.Tensor,
        backend: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (what the feed-forward layer adds, the residual stream before it)."""
        x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        x_TD = self.attention(x_TD, rotary_rows, backend)
        x_TD, residual_TD = self.mlp_norm(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class Decoder(Model):
    """A whole model of this family."""

    base_prefix = "model."
    ignored_tensors = ("rotary_emb.inv_freq", *NAME_ENDS)

    def __init__(self, spec: ModelSpec, options: DecoderOptions, factory: ParamFactory) -> None:
        super().__init__()
        check_activation(spec.layers, spec.model_type)
        size = spec.hidden_size
        self.embedding = Embedding("model.embed_tokens", spec.vocab_size, size, factory)
        self.rotary = Rotary(spec, factory)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, options, factory) for layer in range(spec.num_layers)
        )
        self.norm = RMSNorm("model.norm", size, spec.layers.norm_eps, factory)
        tied = self.embedding if spec.tie_embeddings else None
        self.head = LMHead("lm_head", spec.vocab_size, size, factory, tied)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        inputs_embeds_TD: torch.Tensor | None = None,
        intermediate_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Model."""
        x_TD = intermediate_TD if intermediate_TD is not None else inputs_embeds_TD
        if x_TD is None:
            x_TD = self.embedding(input_ids_T)
        rotary_rows = self.rotary(positions_T)
        residual_TD = None
        for layer in self.layers:
            x_TD, residual_TD = layer(x_TD, residual_TD, rotary_rows, attention)
        hidden_TD: torch.Tensor = self.norm(x_TD, residual_TD)[0]
        return hidden_TD
