"""A tensor times a number. Shape legend: T tokens, D any dimension."""

import torch

from quire.ops.registry import op


@op("scale")
def scale(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, in x's dtype. torch's operation is one launch on a GPU, too."""
    return x_TD * factor
