"""Gather of some rows. Shape legend: T tokens, R selected rows, D model dim."""

import torch

from quire.ops.registry import op


@op("select_rows")
def select_rows(x_TD: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """The rows of x that the int64 index names, as [R, D]."""
    return x_TD.index_select(0, index_R)
