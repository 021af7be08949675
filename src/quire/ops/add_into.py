"""Sum of two tensors into memory of the caller. Shape legend: T tokens, D model dim."""

import torch

from quire.ops.registry import op


@op("add_into")
def add_into(out_TD: torch.Tensor, x_TD: torch.Tensor, y_TD: torch.Tensor | None) -> None:
    """Write x + y, or x alone, to columns of wider rows."""
    if y_TD is None:
        out_TD.copy_(x_TD)
    else:
        torch.add(x_TD, y_TD, out=out_TD)
