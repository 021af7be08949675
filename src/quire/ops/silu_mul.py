"""The gate of a gated feed-forward layer. Shape legend: T tokens, F feed-forward dim, E = 2 F."""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.registry import op


@op("silu_mul")
def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as [T, F], for the two of them side by side in one tensor [T, 2 F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.silu_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF).mul_(up_TF)
