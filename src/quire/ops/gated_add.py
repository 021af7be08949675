"""An addition of rows that have a gate each. Shape legend: T tokens, D model dim."""

import torch

from quire.ops.registry import op


@op("gated_add")
def gated_add(x_TD: torch.Tensor, y_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """x + sigmoid(gate) y."""
    return torch.addcmul(x_TD, torch.sigmoid(gate_T1), y_TD)
