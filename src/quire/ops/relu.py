"""max(x, 0). Shape legend: T tokens, F feed-forward dim."""

import torch

from quire.ops.registry import op


@op("relu")
def relu(x_TF: torch.Tensor) -> torch.Tensor:
    """Elementwise max(x, 0)."""
    return torch.relu(x_TF)
