"""Normalisation by the root mean square, or by mean and variance.

Shape legend: T tokens, D the normalised (last) dimension, N heads, E size of a head's vector. More
dimensions may stand between T and D.
"""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("rms_norm")
def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, [T, D], in x's dtype. The
    weight's shape must broadcast with x, so heads with different weights share one call. Sums are
    in float32 (float64 for float64)."""
    if kernels := kernels_for(x_TD, "norm"):
        found: torch.Tensor = kernels.rms_norm(x_TD, weight_D, eps)
        return found
    return _normalise(x_TD, weight_D, eps)


@op("add_rms_norm")
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [T, D]."""
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


@op("square_sums")
def square_sums(x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """Return each token's sums of squares of x and y, [T, 2], in float32 (float64 for float64)."""
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
    """Return x / sqrt(sum / count + eps) * weight, [T, D], in x's dtype. sums [T, 2]: sums of
    squares of `count` numbers each; column `index` is used."""
    factor_T1 = (sums_T2[:, index : index + 1] / count + eps).rsqrt()
    return (x_TD.to(sums_T2.dtype) * factor_T1 * weight_D).to(x_TD.dtype)


@op("gated_norm")
def gated_norm(
    x_TNE: torch.Tensor, gate_TNE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight * silu(gate), [T, N, E], in x's dtype. The
    normalised x is rounded to x's dtype before the product with the weight."""
    if kernels := kernels_for(x_TNE, "norm"):
        found: torch.Tensor = kernels.gated_norm(x_TNE, gate_TNE, weight_E, eps)
        return found
    dtype = accumulation_dtype(x_TNE.dtype)
    x = x_TNE.to(dtype)
    scaled = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (scaled.to(x_TNE.dtype) * weight_E).to(dtype)
    return (normed * torch.nn.functional.silu(gate_TNE.to(dtype))).to(x_TNE.dtype)


@op("layer_norm")
def layer_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor | None, bias_D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, [T, D]."""
    return torch.nn.functional.layer_norm(x_TD, x_TD.shape[-1:], weight_D, bias_D, eps)
