"""The precision of sums, and weights whose products must not depend on the batch.

A batch-invariant weight has a type of its own. The operations of layers and experts look at the
type, as they do for packed weights. To everything else it is the parameter that it was.
"""

import torch
from torch import nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class FixedOrderWeight(nn.Parameter):
    """A parameter whose products are made by a kernel with one order of sums for any number of
    rows: [O, I] of a linear layer, or [E, O, I] of experts."""

    def __new__(cls, weight: torch.Tensor) -> "FixedOrderWeight":
        """The same memory as the weight's."""
        made: FixedOrderWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        return made
