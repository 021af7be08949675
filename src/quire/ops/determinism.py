"""How an operation learns that a row's bits must not depend on the other rows of its call.

A weight says so: the operations of layers and experts look at its type, as they do for packed ones.
To everything else it is the parameter that it was.
"""

import torch
from torch import nn


class FixedOrderWeight(nn.Parameter):
    """A parameter whose products are made by a kernel with one order of sums for any number of
    rows: [O, I] of a linear layer, or [E, O, I] of experts."""

    def __new__(cls, weight: torch.Tensor) -> "FixedOrderWeight":
        """The same memory as the weight's."""
        made: FixedOrderWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        return made
