"""Attention inside a vision tower, and the rotation of its queries and keys.

Shape legend: T patches, N heads, H head dim.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.attention_inputs import Scores
from quire.ops.precision import accumulation_dtype

Int64 = npt.NDArray[np.int64]


class BlockAttention(Protocol):
    """Attention of a tower's blocks within ranges of patches, such as frames or windows. A cut is
    the index of one division of all patches into ranges."""

    def write(self, cut: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor, /) -> None:
        """Store the keys and values of a block, [T, N, H] each."""
        ...

    def run(self, cut: int, q_TNH: torch.Tensor, scores: Scores, /) -> torch.Tensor:
        """Attend with the queries of the same block within their ranges; return [T, N, H]."""
        ...


class RangeAttention:
    """Attention with torch's operations, on any device. cuts: bounds of the ranges of each cut."""

    def __init__(self, cuts: Sequence[Sequence[int]]) -> None:
        self._cuts = cuts
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, cut: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        """See BlockAttention."""
        self._kv = {cut: (k_TNH, v_TNH)}

    def run(self, cut: int, q_TNH: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See BlockAttention."""
        k_TNH, v_TNH = self._kv.pop(cut)
        return range_attention(q_TNH, k_TNH, v_TNH, self._cuts[cut], scores.scale)


def range_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    bounds: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Return softmax(q k^T * scale) v within each range of patches, [T, N, H].

    bounds: cumulative lengths of the ranges, from 0 to T. A patch attends to all patches of its own
    range and to no others. Neighbouring ranges of equal length are computed in one call.
    """
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    start = 0
    for length, group in groupby(end - first for first, end in pairwise(bounds)):
        num = len(list(group))
        end = start + num * length
        q, k, v = (x[start:end].unflatten(0, (num, length)).transpose(1, 2) for x in
                   (q_TNH, k_TNH, v_TNH))  # fmt: skip
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        out_TNH[start:end] = found.transpose(1, 2).flatten(0, 1)
        start = end
    assert start == q_TNH.shape[0], "the ranges hold all patches"
    return out_TNH


def axial_rotary_rows(
    positions_T2: Int64, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the factors of a two-dimensional rotation for `ops/rotary.py`, [T, 1, 2 H] in the
    accumulation dtype. positions: row and column of each patch, int64 [T, 2].

    The first half of the angles comes from a patch's row, the second half from its column
    (Qwen2-VL, arXiv 2409.12191). Angles are computed in float64.
    """
    per_axis = head_dim // 2
    frequencies = theta ** -(np.arange(0, per_axis, 2) / per_axis)
    angles = (positions_T2[:, :, None] * frequencies).reshape(len(positions_T2), per_axis)
    cos, sin = np.cos(angles), np.sin(angles)
    rows = torch.from_numpy(np.concatenate((cos, cos, -sin, sin), axis=1))
    return rows.to(device, accumulation_dtype(dtype))[:, None]
