"""The gate of a feed-forward layer that is gated by a Gaussian error linear unit. Shape legend:
T tokens, F feed-forward dim, E = 2 F."""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.registry import op


@op("gelu_mul")
def gelu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up as [T, F], for the two of them side by side in one tensor [T, 2 F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.gelu_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate_TF).mul_(up_TF)


@op("gelu_tanh_mul")
def gelu_tanh_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """The same with the approximation by tanh (`gelu_new`, `gelu_pytorch_tanh` in configs)."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.gelu_tanh_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate_TF, approximate="tanh").mul_(up_TF)
