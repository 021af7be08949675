"""Attention of models whose tokens see each other in both directions, within one step.

Each row has all of its tokens in the step, so nothing is cached. The C++ core still reads keys and
values from blocks. So a step's keys and values are in blocks of its own, which each layer reuses:

    row 0, of 20 tokens    blocks 0, 1            row 1, of 40    blocks 2, 3, 4           (P = 16)

Shape legend: as in `base.py`, and L tokens of a row, Q tokens of a piece, C tokens that it sees. A
token at position i sees the tokens at j with |i - j| < window, or all tokens of its row.
"""

from dataclasses import replace

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.cpu import CpuBackend, why_not
from quire.ops.attention_inputs import AttentionStep, Int32, Scores
from quire.ops.registry import op
from quire.spec.cache_group import STEP


class CoreWithinStep(CpuBackend):
    """C++ backend that assigns new blocks to each row in every step. Raises ConfigError as
    CpuBackend does."""

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


PIECE = 1024  # tokens of a row whose scores are in memory at once


def is_within_step(layout: KVLayout) -> bool:
    """Return whether the layers of a layout cache nothing between steps."""
    return any(group.kind == STEP for group in layout.groups)


def make_within_step(name: str, layout: KVLayout) -> AttentionBackend:
    """Make the backend called `name`; `auto` selects the fastest. Raises ConfigError for a backend
    that needs a KV cache."""
    if name == "cpu" or (name == "auto" and why_not(layout) is None):
        return CoreWithinStep(layout)
    if name not in ("auto", "torch", "reference"):
        raise ConfigError(
            f"attention_backend {name} needs a KV cache, which this model does not have: its"
            " tokens see each other in both directions. Remove it, or use cpu or torch."
        )
    return WithinStep(layout)


class WithinStep(AttentionBackend):
    """Backend of torch operations, for any device. It attends row by row, so a row's numbers do not
    depend on the other rows of its step."""

    name = "torch"

    def __init__(self, layout: KVLayout) -> None:
        of_layer = layout.group_of_layer()
        self._windows = {layer: layout.groups[g].window for layer, g in of_layer.items()}
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: list[int] = []

    def prepare(self, step: AttentionStep) -> None:
        """Store the lengths of a step's rows."""
        assert step.ends_T is None, "all tokens of a row see each other"
        self._lengths = step.query_lens_host.tolist()

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Hold a layer's keys and values, [T, N, H] each, until its `run`."""
        self._kv = {layer: (k_TKH, v_TKH)}

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See AttentionBackend. Soft caps and sinks are not supported, and there must be as many KV
        heads as query heads."""
        assert scores.soft_cap is None and scores.sinks_N is None, "no encoder here has these"
        if out_TNH is None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        k_TNH, v_TNH = self._kv.pop(layer)
        window, begin = self._windows[layer], 0
        for length in self._lengths:
            row = slice(begin, begin + length)
            _attend_row(q_TNH[row], k_TNH[row], v_TNH[row], scores.scale, window, out_TNH[row])
            begin += length
        return out_TNH

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Do nothing: there are no blocks."""

    swap_out = load = copy_blocks


def _attend_row(
    q_LNH: torch.Tensor,
    k_LNH: torch.Tensor,
    v_LNH: torch.Tensor,
    scale: float,
    window: int | None,
    out_LNH: torch.Tensor,
) -> None:
    """Write attention of a row's L tokens to each other to `out`, [L, N, H]."""
    length = len(q_LNH)
    for first in range(0, length, PIECE):
        end = min(first + PIECE, length)
        begin, last, mask_QC = 0, length, None
        if window is not None:
            begin, last = max(0, first - window + 1), min(length, end + window - 1)
            at_Q = torch.arange(first, end, device=q_LNH.device)
            at_C = torch.arange(begin, last, device=q_LNH.device)
            mask_QC = (at_Q[:, None] - at_C).abs() < window
        q_1NQH, k_1NCH, v_1NCH = (
            x.transpose(0, 1)[None]
            for x in (q_LNH[first:end], k_LNH[begin:last], v_LNH[begin:last])
        )
        found_1NQH = torch.nn.functional.scaled_dot_product_attention(
            q_1NQH, k_1NCH, v_1NCH, attn_mask=mask_QC, scale=scale
        )
        out_LNH[first:end] = found_1NQH[0].transpose(0, 1)
