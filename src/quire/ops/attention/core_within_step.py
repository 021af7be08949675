"""Attention in both directions by the C++ core (see `within_step.py`), which reads keys and values
from blocks. So those of a step stand in some, of one layer after the other:

    row 0, of 20 tokens    blocks 0, 1            row 1, of 40    blocks 2, 3, 4           (P = 16)

Shape legend as in `base.py`.
"""

from dataclasses import replace

import numpy as np
import torch

from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention_inputs import AttentionStep


class CoreWithinStep(CpuBackend):
    """Gives each row blocks anew in every step. Raises ConfigError as CpuBackend does."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout, cascade=False)  # no rows share blocks

    def prepare(self, step: AttentionStep) -> None:
        """See AttentionBackend."""
        size, num_groups = self._layout.block_size, len(self._layout.groups)
        lengths_S = step.query_lens_host.astype(np.int64)
        num_blocks_S = -(-lengths_S // size)
        first_S = np.cumsum(num_blocks_S) - num_blocks_S
        table_SL = first_S[:, None] + np.arange(num_blocks_S.max(initial=1))
        row_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
        begin_S = np.cumsum(lengths_S) - lengths_S
        slots_T = np.arange(len(row_T)) + (first_S * size - begin_S)[row_T]
        tables = torch.from_numpy(table_SL.astype(np.int32))
        slots = torch.from_numpy(slots_T)
        super().prepare(
            replace(step, block_tables_SL=(tables,) * num_groups, slots_T=(slots,) * num_groups)
        )
