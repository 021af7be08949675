"""Two tensors side by side. Shape legend: T tokens, A and B their columns."""

import torch

from quire.ops.registry import op


@op("beside")
def beside(x_TA: torch.Tensor, y_TB: torch.Tensor) -> torch.Tensor:
    """Return [T, A + B]."""
    return torch.cat((x_TA, y_TB), dim=1)
