"""A product with a gate. Shape legend: T tokens, M numbers of each."""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.registry import op


@op("sigmoid_mul")
def sigmoid_mul(x_TM: torch.Tensor, gate_TM: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), in x's dtype."""
    if kernels := kernels_for(x_TM, "gate"):
        found: torch.Tensor = kernels.sigmoid_mul(x_TM, gate_TM)
        return found
    return x_TM * torch.sigmoid(gate_TM)
