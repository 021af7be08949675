"""Root-mean-square normalisation, alone or after a residual addition.

Shape legend: T tokens, D the normalised (last) dimension; between them may stand more dimensions.
"""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("rms_norm")
def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype.

    The weight's shape must broadcast with x: heads with weights of their own share one call.
    Sums are made in float32 (float64 for float64).
    """
    if kernels := kernels_for(x_TD, "norm"):
        found: torch.Tensor = kernels.rms_norm(x_TD, weight_D, eps)
        return found
    return _normalise(x_TD, weight_D, eps)


@op("add_rms_norm")
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual)."""
    if kernels := kernels_for(x_TD, "norm"):
        pair: tuple[torch.Tensor, torch.Tensor]
        pair = kernels.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return pair
    total_TD = x_TD + residual_TD
    return _normalise(total_TD, weight_D, eps), total_TD


def _normalise(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    # vector_norm reads x once and makes no copy in float32, unlike square().mean().
    dtype = accumulation_dtype(x_TD.dtype)
    length_T1: torch.Tensor = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=dtype)
    mean_square_T1 = length_T1.square_().mul_(1.0 / x_TD.shape[-1])
    scaled_TD = x_TD.to(dtype) * mean_square_T1.add_(eps).rsqrt_()
    return scaled_TD.mul_(weight_D).to(x_TD.dtype)
