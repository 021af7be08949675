"""Root-mean-square normalisation of vectors that have a gate each.

Shape legend: T tokens, N heads, E the size of their vectors.
"""

import torch
import torch.nn.functional as F

from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("gated_norm")
def gated_norm(
    x_TNE: torch.Tensor, gate_TNE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), in x's dtype; the norm is rounded to that
    before the weight is multiplied."""
    if kernels := kernels_for(x_TNE, "norm"):
        found: torch.Tensor = kernels.gated_norm(x_TNE, gate_TNE, weight_E, eps)
        return found
    dtype = accumulation_dtype(x_TNE.dtype)
    x = x_TNE.to(dtype)
    scaled = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (scaled.to(x_TNE.dtype) * weight_E).to(dtype)
    return (normed * F.silu(gate_TNE.to(dtype))).to(x_TNE.dtype)
