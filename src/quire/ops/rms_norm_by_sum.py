"""Root-mean-square normalisation of vectors that several ranks have parts of.

Shape legend: T tokens, D the part's dimension.
"""

import torch

from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("square_sums")
def square_sums(x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """The sums of squares [T, 2] of two vectors of each token, in float32 (float64 for float64)."""
    dtype = accumulation_dtype(x_TD.dtype)
    both = [each.to(dtype).square().sum(dim=-1) for each in (x_TD, y_TD)]
    return torch.stack(both, dim=-1)


@op("rms_norm_by_sum")
def rms_norm_by_sum(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    sums_T2: torch.Tensor,
    index: int,
    count: int,
    eps: float,
) -> torch.Tensor:
    """x / sqrt(sum / count + eps) * weight, in x's dtype, by the sums of this index, which are of
    `count` numbers."""
    factor_T1 = (sums_T2[:, index : index + 1] / count + eps).rsqrt()
    return (x_TD.to(sums_T2.dtype) * factor_T1 * weight_D).to(x_TD.dtype)
