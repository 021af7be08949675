"""OLMo 2: norms only after attention and feed-forward layer; queries and keys have norms over all
of their heads together.

Shape legend: T tokens, D model dim, N query heads, K KV heads, H head dim.
"""

import torch
from torch import nn

from quire.base.model_spec import ModelSpec
from quire.models.decoder import Decoder, DecoderAttention, LayerPlace, feed_forward, norm_of
from quire.models.layers import ParamFactory, RMSNorm
from quire.models.options import DecoderOptions
from quire.ops.add import add
from quire.ops.attention.base import AttentionBackend
from quire.ops.rotary import rotary


class Olmo2Attention(DecoderAttention):
    """Rotary attention with a norm over all queries of a token, and one over all its keys."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        size, eps, name = at.spec.head_dim, at.spec.layers.norm_eps, f"{at.name}.self_attn"
        self._sizes = [count * size for count in (self._heads, self._kv_heads, self._kv_heads)]
        self.q_norm = RMSNorm(f"{name}.q_norm", self._sizes[0], eps, at.factory)
        self.k_norm = RMSNorm(f"{name}.k_norm", self._sizes[1], eps, at.factory)

    def forward(
        self, x_TD: torch.Tensor, rotary_rows: torch.Tensor | None, backend: AttentionBackend
    ) -> torch.Tensor:
        """See DecoderAttention."""
        assert rotary_rows is not None, "all layers turn queries and keys"
        q, k, v = self.qkv(x_TD).split(self._sizes, dim=1)
        q_TNH, k_TKH, v_TKH = (
            heads.unflatten(1, (-1, self._head_dim))
            for heads in (self.q_norm(q)[0], self.k_norm(k)[0], v)
        )
        q_TNH, k_TKH = rotary(q_TNH, rotary_rows), rotary(k_TKH, rotary_rows)
        out: torch.Tensor = self.output(self.attention(q_TNH, k_TKH, v_TKH, backend))
        return out


class Olmo2Layer(nn.Module):
    """Attention and feed-forward, each with a norm after it."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.attention = Olmo2Attention(at)
        self.after_attention = norm_of(at, "post_attention_layernorm")
        self.mlp = feed_forward(at)
        self.after_mlp = norm_of(at, "post_feedforward_layernorm")

    def forward(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor | None,
        rotary_rows: torch.Tensor | None,
        backend: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD = x_TD if residual_TD is None else add(x_TD, residual_TD)
        out_TD = self.after_attention(self.attention(x_TD, rotary_rows, backend))[0]
        x_TD = add(x_TD, out_TD)
        return self.after_mlp(self.mlp(x_TD))[0], x_TD


class Olmo2(Decoder):
    """A whole OLMo 2 model."""

    layer_kind = Olmo2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        super().__init__(spec, DecoderOptions(qkv_bias=bias, output_bias=bias), factory)
