"""Small operations: sums, activations, gates, wider rows.

Shape legend: T tokens, D any dimension, F feed-forward dim, E = 2 F, R rows.
"""

from dataclasses import dataclass

import torch

from quire.base.requests.pooling import SECOND_TEXT
from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("add")
def add(x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """x + y."""
    return x_TD + y_TD


@op("add_into")
def add_into(out_TD: torch.Tensor, x_TD: torch.Tensor, y_TD: torch.Tensor | None) -> None:
    """Write x + y, or x alone, to columns of wider rows."""
    if y_TD is None:
        out_TD.copy_(x_TD)
    else:
        torch.add(x_TD, y_TD, out=out_TD)


@op("scale")
def scale(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """x * factor, in x's dtype. torch's operation is one launch on a GPU, too."""
    return x_TD * factor


@op("relu")
def relu(x_TF: torch.Tensor) -> torch.Tensor:
    """Elementwise max(x, 0)."""
    return torch.relu(x_TF)


QUICK_GELU = 1.702


@op("gelu")
def gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """x times the normal distribution function of x."""
    return torch.nn.functional.gelu(x_TF)


@op("gelu_tanh")
def gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    """The approximation by tanh (`gelu_new`, `gelu_pytorch_tanh` in configs)."""
    return torch.nn.functional.gelu(x_TF, approximate="tanh")


@op("quick_gelu")
def quick_gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), the approximation of CLIP's towers."""
    return x_TF * torch.sigmoid(QUICK_GELU * x_TF)


@op("silu_mul")
def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as [T, F], for the two of them side by side in one tensor [T, 2 F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.silu_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF).mul_(up_TF)


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


@op("sigmoid_mul")
def sigmoid_mul(x_TM: torch.Tensor, gate_TM: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate), in x's dtype."""
    if kernels := kernels_for(x_TM, "gate"):
        found: torch.Tensor = kernels.sigmoid_mul(x_TM, gate_TM)
        return found
    return x_TM * torch.sigmoid(gate_TM)


@op("gated_add")
def gated_add(x_TD: torch.Tensor, y_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """x + sigmoid(gate) y."""
    return torch.addcmul(x_TD, torch.sigmoid(gate_T1), y_TD)


@op("soft_cap")
def soft_cap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), in x's dtype."""
    if kernels := kernels_for(x_RV, "gate"):
        found: torch.Tensor = kernels.soft_cap(x_RV, cap)
        return found
    capped_RV = x_RV.to(accumulation_dtype(x_RV.dtype)) / cap
    return capped_RV.tanh_().mul_(cap).to(x_RV.dtype)


@op("beside")
def beside(x_TA: torch.Tensor, y_TB: torch.Tensor) -> torch.Tensor:
    """Return [T, A + B]."""
    return torch.cat((x_TA, y_TB), dim=1)


@op("fill_up")
def fill_up(x_RN: torch.Tensor, width: int) -> torch.Tensor:
    """The same rows with so many columns, the new ones -inf."""
    return torch.nn.functional.pad(x_RN, (0, width - x_RN.shape[1]), value=-torch.inf)


@op("plain_ids")
def plain_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return the ids without that."""
    return ids_T % SECOND_TEXT


@op("segment_ids")
def segment_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return 0 for tokens of the first text, 1 for those of the second."""
    return ids_T // SECOND_TEXT
