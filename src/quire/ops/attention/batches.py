"""A step's rows sorted into batches for the torch backend, and the attention of one batch.

Shape legend as in `torch_cpu.py`; S rows of the step, R rows of the batch, I blocks of a row.

All sizes come from the host's upper bounds, all values from the device's tensors.
"""

from dataclasses import dataclass

import numpy as np
import torch

from quire.base.model_spec import CacheGroup
from quire.ops.attention.base import AttentionStep, Int32, KVLayout

# Gathered keys and values of a batch: about what stays in the last-level cache of a small CPU.
BATCH_BYTES = 6 << 20
# Rows with at most so many new tokens are batched with others; a longer chunk is its own batch.
SHORT_QUERY = 8
# The longest context of a batch, relative to the shortest: bounds what is padded.
LENGTH_RATIO = 1.5
# Query tokens of a chunk that are multiplied at once: bounds the memory of the scores.
QUERY_SPAN = 128


@dataclass(frozen=True)
class Batch:
    """R rows with Q new tokens each, and what their attention needs.

    tokens: the slice or int64 index of the step's tokens that are theirs, row after row.
    blocks: int64 [R * I], the blocks to gather. hidden: bool [R, Q, C], True where a query does not
    see a token.
    """

    num_rows: int
    num_queries: int
    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    hidden_RQC: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.blocks.numel()

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_KRCH: torch.Tensor,
        v_KRCH: torch.Tensor,
        scale: float,
        out_TNH: torch.Tensor,
    ) -> None:
        """Write the attention of the batch's tokens to `out`."""
        heads, rows, _, size = k_KRCH.shape
        q_KRGQH = (
            q_TNH[self.tokens].view(rows, self.num_queries, heads, -1, size).permute(2, 0, 3, 1, 4)
        )
        weigh = _weigh_by_products if _prefers_products(k_KRCH) else _weigh_by_sdpa
        out_KRGQH = weigh(q_KRGQH, k_KRCH, v_KRCH, self.hidden_RQC, scale)
        out_RQKGH = out_KRGQH.permute(1, 3, 0, 2, 4)
        out_TNH[self.tokens] = out_RQKGH.reshape(-1, *q_TNH.shape[1:])


def _prefers_products(k_KRCH: torch.Tensor) -> bool:
    """On a CPU the fused operation multiplies 16-bit numbers slowly, matrix products do it fast."""
    return k_KRCH.device.type == "cpu" and k_KRCH.dtype.itemsize == 2
