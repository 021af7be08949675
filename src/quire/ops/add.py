"""Sum of two tensors of one shape. Shape legend: T tokens, D model dim."""

import torch

from quire.ops.registry import op


@op("add")
def add(x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """x + y."""
    return x_TD + y_TD
