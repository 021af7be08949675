"""FlashInfer's batched attention of prompts over block tables (Ye et al. 2025).

FlashInfer plans a step from lengths on the host, so it serves steps whose rows are all prompts.
Shape legend: as in base.py.
"""

from typing import Any

import numpy as np
import torch

from quire.ops.attention_inputs import Scores
from quire.ops.host.host_memory import to_device
from quire.ops.prompt_kernels.base import PagedStep, PromptKernel

WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommended size; all wrappers share it
MAX_HEAD_ELEMENTS = 1 << 32  # FlashInfer counts the elements from one head to another in 32 bits


class FlashInfer(PromptKernel):
    """Wrappers of the package, one for each window, soft cap and number of heads. Each plans once
    per step."""

    name = "flashinfer"
    package = "flashinfer-python"
    module = "flashinfer"

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._planned: dict[tuple[Any, ...], tuple[Any, PagedStep | None]] = {}

    def why_not_on(self, capability: tuple[int, int], head_dim: int) -> str | None:
        """See PromptKernel."""
        if head_dim not in (64, 128, 256):
            return f"it has heads of 64, 128 and 256 numbers, not {head_dim}"
        return super().why_not_on(capability, head_dim)

    def serves(self, paged: PagedStep, scores: Scores) -> bool:
        """See PromptKernel."""
        return paged.has_only_prompts

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
        num_kv_heads = k_BPKH.shape[2]
        assert k_BPKH.stride(2) * num_kv_heads < MAX_HEAD_ELEMENTS, "too many blocks for FlashInfer"
        key = (paged.window, scores.scale, scores.soft_cap, q_TNH.shape[1:], num_kv_heads)
        wrapper, planned = self._planned.get(key, (None, None))
        if wrapper is None:
            wrapper = self._wrapper(q_TNH.device)
        if planned is not paged:
            self._plan(wrapper, q_TNH, num_kv_heads, paged, scores)
            self._planned[key] = wrapper, paged
        num_tokens = int(paged.step.query_lens_host.sum())
        kv = k_BPKH.transpose(1, 2), v_BPKH.transpose(1, 2)
        wrapper.run(q_TNH[:num_tokens], kv, out=out_TNH[:num_tokens])

    def _wrapper(self, device: torch.device) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self.load().BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _plan(
        self,
        wrapper: Any,
        q_TNH: torch.Tensor,
        num_kv_heads: int,
        paged: PagedStep,
        scores: Scores,
    ) -> None:
        step, size = paged.step, paged.block_size
        rows = np.flatnonzero(step.query_lens_host)
        queries, contexts = step.query_lens_host[rows], step.context_lens_host[rows]
        num_blocks = -(-contexts // size)
        # Entries of the table one row after the other. Unused entries may be -1.
        at = np.concatenate([row * paged.table_SL.shape[1] + np.arange(num)
                             for row, num in zip(rows, num_blocks, strict=True)])  # fmt: skip
        blocks = paged.table_SL.flatten()[to_device(at, q_TNH.device)].clamp(min=0)
        wrapper.plan(
            _starts(queries),
            _starts(num_blocks),
            blocks,
            torch.from_numpy((contexts - (num_blocks - 1) * size).astype(np.int32)),
            q_TNH.shape[1],
            num_kv_heads,
            q_TNH.shape[2],
            size,
            causal=True,
            sm_scale=scores.scale,
            logits_soft_cap=scores.soft_cap,
            window_left=-1 if paged.window is None else paged.window - 1,
            q_data_type=q_TNH.dtype,
            kv_data_type=q_TNH.dtype,
        )


def _starts(lengths: np.ndarray) -> torch.Tensor:
    """Return prefix sums with 0 first, on the host."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
