"""The clamped gate of gpt-oss' experts. Shape legend: T tokens, F feed-forward dim, E = 2 F."""

from dataclasses import dataclass

import torch

from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@dataclass(frozen=True)
class ClampedGate:
    """gate sigmoid(alpha gate) (up + 1), of a gate that is at most `limit` and an up that is from
    -limit to limit; of the two side by side in one tensor [T, 2 F], as [T, F]."""

    alpha: float
    limit: float

    def __call__(self, gate_up_TE: torch.Tensor) -> torch.Tensor:
        return clamped_gate(gate_up_TE, self.alpha, self.limit)


@op("clamped_gate")
def clamped_gate(gate_up_TE: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See ClampedGate."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.clamped_gate(gate_up_TE, alpha, limit)
        return found
    gate_TF, up_TF = gate_up_TE.to(accumulation_dtype(gate_up_TE.dtype)).chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return ((up_TF + 1) * (gate_TF * torch.sigmoid(alpha * gate_TF))).to(gate_up_TE.dtype)
