"""Attention backend for forward passes that only record which operations a model calls.

Shape legend: T tokens, N heads (of queries; of values in the delta rule), K KV heads, H head dim, C
channels, E value dim.
"""

import torch

from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import AttentionStep, DeltaHeads, Int32, Scores
from quire.ops.registry import op


class TracedAttention(AttentionBackend):
    """Stand-in for an attention backend while a model is traced: stores and computes nothing."""

    name = "traced"

    def prepare(self, step: AttentionStep) -> None:
        """Do nothing."""

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Do nothing; the call is recorded. k, v: [T, K, H]."""

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return zeros, [T, N, H]."""
        return q_TNH.new_zeros(q_TNH.shape)

    @op("latent_write")
    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """Do nothing; the call is recorded. latent: [T, L]."""

    @op("latent_attention")
    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """Return zeros, [T, N, num_values]."""
        return q_TNL.new_zeros(*q_TNL.shape[:2], num_values)

    @op("convolve")
    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        """Return zeros, [T, C]."""
        return x_TC.new_zeros(x_TC.shape)

    @op("delta_rule")
    def delta_rule(
        self,
        layer: int,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        rate_N: torch.Tensor,
        shift_N: torch.Tensor,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        """Return zeros, [T, N, E]."""
        return qkv_TC.new_zeros(len(qkv_TC), heads.values, heads.value_dim)

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Do nothing: there are no blocks."""

    swap_out = load = copy_blocks
