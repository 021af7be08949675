"""OLMo 2: norms only after attention and feed-forward layer, and norms over all query heads and
over all key heads of a token.

Shape legend: T tokens, D model dim, N query heads, K KV heads, H head dim.
"""

from dataclasses import replace

import torch
from torch import nn

from quire.models.checkpoint.sources import Source
from quire.models.parts.decoder import (
    Decoder,
    DecoderAttention,
    LayerPlace,
    LayerStep,
    feed_forward,
    norm_of,
)
from quire.models.parts.layers import ParamFactory, RMSNorm
from quire.models.parts.options import DecoderOptions
from quire.ops.collective import all_reduce
from quire.ops.elementwise import add
from quire.ops.norms import rms_norm_by_sum, square_sums
from quire.ops.rotary import rotary
from quire.spec.cuts import Cut
from quire.spec.model_spec import ModelSpec


class Olmo2Attention(DecoderAttention):
    """Rotary attention with a norm over all queries of a token, and one over all its keys."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        size, eps, name = at.spec.head_dim, at.spec.layers.norm_eps, f"{at.name}.self_attn"
        self._sizes = [count * size for count in (self._heads, self._kv_heads, self._kv_heads)]
        self._group, self._eps = at.factory.place.tensor, eps
        self.q_norm = PartNorm(f"{name}.q_norm", at.heads.times(size), eps, at.factory)
        self.k_norm = PartNorm(f"{name}.k_norm", at.kv_heads.times(size), eps, at.factory)

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """See DecoderAttention."""
        rotary_rows, backend, _ = step
        assert rotary_rows is not None, "all layers turn queries and keys"
        q, k, v = self.qkv(x_TD).split(self._sizes, dim=1)
        q, k = self._normed(q, k)
        q_TNH, k_TKH, v_TKH = (heads.unflatten(1, (-1, self._head_dim)) for heads in (q, k, v))
        q_TNH, k_TKH = rotary(q_TNH, rotary_rows), rotary(k_TKH, rotary_rows)
        out: torch.Tensor = self.output(self.attention(q_TNH, k_TKH, v_TKH, backend))
        return out

    def _normed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise queries [T, N * H] and keys [T, K * H] over the heads of all ranks."""
        if self._group.size == 1:
            return self.q_norm(q)[0], self.k_norm(k)[0]
        sums_T2 = all_reduce(square_sums(q, k), self._group)
        return self.q_norm.by_sum(q, sums_T2, 0), self.k_norm.by_sum(k, sums_T2, 1)


class PartNorm(RMSNorm):
    """RMS normalisation of vectors that are divided among ranks. part: this rank's part."""

    def __init__(self, name: str, part: Cut, eps: float, factory: ParamFactory) -> None:
        super().__init__(name, part.count, eps, factory)
        # The sum counts a part once for each rank that holds it.
        self._num_summed = part.count * factory.place.tensor.size
        self._rows = None if part.is_whole else part

    def by_sum(self, x: torch.Tensor, sums_T2: torch.Tensor, index: int) -> torch.Tensor:
        """Normalise x [T, D] by column `index` of the sums of squares over all ranks, [T, 2]."""
        return rms_norm_by_sum(x, self.weight, sums_T2, index, self._num_summed, self.eps)

    def sources(self) -> list[Source]:
        return [replace(source, rows=self._rows) for source in super().sources()]


class Olmo2Layer(nn.Module):
    """Attention and feed-forward, each with a norm after it."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self.attention = Olmo2Attention(at)
        self.after_attention = norm_of(at, "post_attention_layernorm")
        self.mlp = feed_forward(at)
        self.after_mlp = norm_of(at, "post_feedforward_layernorm")

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD = x_TD if residual_TD is None else add(x_TD, residual_TD)
        out_TD = self.after_attention(self.attention(x_TD, step))[0]
        x_TD = add(x_TD, out_TD)
        return self.after_mlp(self.mlp(x_TD))[0], x_TD


class Olmo2(Decoder):
    """A whole OLMo 2 model."""

    layer_kind = Olmo2Layer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias = spec.layers.attention_bias
        super().__init__(spec, DecoderOptions(qkv_bias=bias, output_bias=bias), factory)
