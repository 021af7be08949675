"""An attention backend for forward passes that only show what a model does.

Shape legend: T tokens, N query heads, K KV heads, H head dim.
"""

import torch

from quire.ops.attention.base import AttentionBackend, AttentionStep, Int32
from quire.ops.registry import op


class TracedAttention(AttentionBackend):
    """Stands for an attention backend while a model is traced: stores and computes nothing."""

    name = "traced"

    def prepare(self, step: AttentionStep) -> None:
        """Do nothing."""

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Noted."""

    @op("attention")
    def run(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        scale: float,
        *,
        out_TNH: torch.Tensor | None = None,
        soft_cap: float | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Noted. [T, N, H]."""
        return q_TNH.new_zeros(q_TNH.shape)

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Do nothing: there are no blocks."""

    swap_out = load = copy_blocks
