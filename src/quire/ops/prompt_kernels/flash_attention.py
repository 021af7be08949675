"""FlashAttention 3 (Shah et al. 2024) from its package `flash_attn_interface`, for Hopper.

The kernel reads block tables and lengths on the device, so it serves prompts together with decoding
rows. Shape legend: as in base.py.
"""

from typing import Any

import torch

from quire.ops.attention_inputs import Scores
from quire.ops.prompt_kernels.base import PagedStep, PromptKernel


class FlashAttention3(PromptKernel):
    """Kernel of the upstream repository's folder `hopper`."""

    name = "flash_attention_3"
    package = "flash-attn-3"
    module = "flash_attn_interface"

    def __init__(self) -> None:
        self._attend: Any = None

    def why_not_on(self, capability: tuple[int, int], head_dim: int) -> str | None:
        """See PromptKernel."""
        if capability[0] != 9:
            return f"it needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
        return None if head_dim <= 256 else f"it has heads of up to 256 numbers, not {head_dim}"

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_BPKH: torch.Tensor,
        v_BPKH: torch.Tensor,
        paged: PagedStep,
        scores: Scores,
        out_TNH: torch.Tensor,
    ) -> None:
        """See PromptKernel."""
        if self._attend is None:
            self._attend = self.load().flash_attn_with_kvcache
        step = paged.step
        found = self._attend(
            q_TNH,
            k_BPKH,
            v_BPKH,
            cache_seqlens=step.context_lens_S,
            page_table=paged.table_SL,
            cu_seqlens_q=step.query_starts_S1,
            max_seqlen_q=int(step.query_lens_host.max()),
            softmax_scale=scores.scale,
            causal=True,
            window_size=(-1, -1) if paged.window is None else (paged.window - 1, 0),
            softcap=scores.soft_cap or 0.0,
        )
        out_TNH.copy_(found)
