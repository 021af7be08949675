"""Precision of sums, and weights whose products do not depend on the batch.

A batch-invariant weight has a type of its own, FixedOrderWeight. Operations of linear layers and of
experts check the type, as they do for packed weights. All other code sees a plain parameter.
"""

import torch
from torch import nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over numbers of `dtype`: float64 for float64, else float32."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class FixedOrderWeight(nn.Parameter):
    """Parameter that a kernel multiplies in one order of sums for any number of rows. Its shape is
    [O, I] for a linear layer, or [E, O, I] for experts."""

    def __new__(cls, weight: torch.Tensor) -> "FixedOrderWeight":
        """Wrap a weight without copying its memory."""
        made: FixedOrderWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        return made
