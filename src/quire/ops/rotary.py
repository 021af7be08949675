"""Rotary position embedding, half-rotation style.

Shape legend: T tokens, N heads (queries and keys in one call), H head dim, E = H / 2, A axes.
Element e of a head's first half and element e of its second half form a point, which is rotated by
the angle position * frequency[e].
"""

import torch

from quire.ops.gpu import DTYPES, kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("rotary_rows")
def rotary_rows(
    positions_T: torch.Tensor, frequencies_E: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return each position's factors, [T, 1, 2 H] = (cos, cos, -sin, sin) * scale, once per step.

    positions: integers [T]. frequencies: float64 [E], radians per token; elements with frequency 0
    are neither rotated nor scaled. With M-RoPE both have a leading dimension of A axes. Each
    frequency is 0 on all axes but its own, so the sum over axes is exact. Positions without the
    leading dimension hold for all axes.

    Angles, sines and cosines are float64: in float32 the angle of position 10^5 is off by 10^-2
    radians. The result has the accumulation type of `dtype`.
    """
    if dtype in DTYPES and (kernels := kernels_for(positions_T, "rotary_rows", any_dtype=True)):
        found: torch.Tensor = kernels.rotary_rows(positions_T, frequencies_E, scale)
        return found
    angles_TE = positions_T.to(torch.float64)[..., None] * frequencies_E.unsqueeze(-2)
    if frequencies_E.dim() == 2:
        angles_TE, frequencies_E = angles_TE.sum(0), frequencies_E.sum(0)
    scale_E = torch.full_like(frequencies_E, scale).masked_fill_(frequencies_E == 0, 1.0)
    cos_TE, sin_TE = angles_TE.cos() * scale_E, angles_TE.sin() * scale_E
    rows_TH = torch.cat((cos_TE, cos_TE, -sin_TE, sin_TE), dim=-1)
    return rows_TH.to(accumulation_dtype(dtype))[:, None]


@op("rotary")
def rotary(x_TNH: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of x by their positions' angles, [T, N, H]. rows: from `rotary_rows`."""
    cos_T1H, sin_T1H = rows.chunk(2, dim=-1)
    exact_TNH = x_TNH.to(rows.dtype)
    turned_TNH = exact_TNH * cos_T1H
    half = x_TNH.shape[-1] // 2
    turned_TNH[..., :half].addcmul_(exact_TNH[..., half:], sin_T1H[..., :half])
    turned_TNH[..., half:].addcmul_(exact_TNH[..., :half], sin_T1H[..., half:])
    return turned_TNH.to(x_TNH.dtype)
