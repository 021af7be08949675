"""Soft-capping of logits. Shape legend: R rows, V vocabulary."""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("soft_cap")
def soft_cap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in x's dtype."""
    if kernels := kernels_for(x_RV, "gate"):
        found: torch.Tensor = kernels.soft_cap(x_RV, cap)
        return found
    capped_RV = x_RV.to(accumulation_dtype(x_RV.dtype)) / cap
    return capped_RV.tanh_().mul_(cap).to(x_RV.dtype)
