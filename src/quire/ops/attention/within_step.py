"""Attention of models whose tokens see each other in both directions: within a step, in which each
row has all of its tokens. Nothing is kept, so there are no blocks; but the C++ core reads a step's
keys and values from some, of its own (core_within_step.py).

Shape legend as in `base.py`, and Q tokens of one piece, C those that it sees.

A token at position i sees those at j with |i - j| < window, or all of its row.
"""

import torch

from quire.base.cache_group import STEP
from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.core_within_step import CoreWithinStep
from quire.ops.attention.cpu import why_not
from quire.ops.attention_inputs import AttentionStep, Int32, Scores
from quire.ops.registry import op

PIECE = 1024  # tokens of a row whose scores are there at once


def is_within_step(layout: KVLayout) -> bool:
    """Tell whether the layers of a layout keep nothing."""
    return any(group.kind == STEP for group in layout.groups)


def make_within_step(name: str, layout: KVLayout) -> AttentionBackend:
    """Make the backend of that name; `auto` takes the fastest. Raises ConfigError."""
    if name == "cpu" or (name == "auto" and why_not(layout) is None):
        return CoreWithinStep(layout)
    if name not in ("auto", "torch", "reference"):
        raise ConfigError(
            f"attention_backend {name} needs a KV cache, which this model does not have: its"
            " tokens see each other in both directions. Remove it, or use cpu or torch."
        )
    return WithinStep(layout)


class WithinStep(AttentionBackend):
    """By torch's operations, on any device: row by row, so that a row's numbers do not depend on
    what else is in the step."""

    name = "torch"

    def __init__(self, layout: KVLayout) -> None:
        of_layer = layout.group_of_layer()
        self._windows = {layer: layout.groups[g].window for layer, g in of_layer.items()}
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: list[int] = []

    def prepare(self, step: AttentionStep) -> None:
        """Take the lengths of a step's rows."""
        assert step.ends_T is None, "all tokens of a row see each other"
        self._lengths = step.query_lens_host.tolist()

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Keep a layer's keys and values until it has attended."""
        self._kv = {layer: (k_TKH, v_TKH)}

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See AttentionBackend; without soft caps and sinks, and with as many heads of keys and
        values."""
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
    """Write what the L tokens of a row take from each other."""
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
