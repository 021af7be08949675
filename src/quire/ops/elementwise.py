"""Small operations: sums, activations, gates, wider rows.

Shape legend: T tokens, D any dimension, F feed-forward dim, E = 2 F, M any dimension, R rows, V and
N columns of logits.
"""

from dataclasses import dataclass

import torch

from quire.base.requests.pooling import SECOND_TEXT
from quire.ops.gpu import kernels_for
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


@op("add")
def add(x_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """Return x + y, [T, D]."""
    return x_TD + y_TD


@op("add_into")
def add_into(out_TD: torch.Tensor, x_TD: torch.Tensor, y_TD: torch.Tensor | None) -> None:
    """Write x + y, or only x if y is None, to `out`, a view [T, D] of columns of wider rows."""
    if y_TD is None:
        out_TD.copy_(x_TD)
    else:
        torch.add(x_TD, y_TD, out=out_TD)


@op("scale")
def scale(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x * factor, [T, D], in x's dtype. torch's operation is one launch on a GPU, too."""
    return x_TD * factor


@op("relu")
def relu(x_TF: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0) of each element, [T, F]."""
    return torch.relu(x_TF)


QUICK_GELU = 1.702


@op("gelu")
def gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """Return x times the normal distribution function of x, [T, F]."""
    return torch.nn.functional.gelu(x_TF)


@op("gelu_tanh")
def gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    """Return GELU approximated by tanh, [T, F] (`gelu_new` and `gelu_pytorch_tanh` in configs)."""
    return torch.nn.functional.gelu(x_TF, approximate="tanh")


@op("quick_gelu")
def quick_gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), [T, F], the approximation that CLIP's towers use."""
    return x_TF * torch.sigmoid(QUICK_GELU * x_TF)


@op("silu_mul")
def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up as [T, F]. gate_up: gate and up concatenated, [T, 2 F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.silu_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TF).mul_(up_TF)


@op("gelu_mul")
def gelu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up as [T, F]. gate_up: gate and up concatenated, [T, 2 F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.gelu_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate_TF).mul_(up_TF)


@op("gelu_tanh_mul")
def gelu_tanh_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Return `gelu_mul` with the tanh approximation, [T, F] (`gelu_new`, `gelu_pytorch_tanh`)."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.gelu_tanh_mul(gate_up_TE)
        return found
    gate_TF, up_TF = gate_up_TE.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate_TF, approximate="tanh").mul_(up_TF)


@dataclass(frozen=True)
class ClampedGate:
    """Gate with clamped inputs: gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up
    from -limit to limit. A call takes gate and up concatenated, [T, 2 F], and returns [T, F]."""

    alpha: float
    limit: float

    def __call__(self, gate_up_TE: torch.Tensor) -> torch.Tensor:
        return clamped_gate(gate_up_TE, self.alpha, self.limit)


@op("clamped_gate")
def clamped_gate(gate_up_TE: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute ClampedGate's formula of gate and up, concatenated as [T, 2 F]; return [T, F]."""
    if kernels := kernels_for(gate_up_TE, "gate"):
        found: torch.Tensor = kernels.clamped_gate(gate_up_TE, alpha, limit)
        return found
    gate_TF, up_TF = gate_up_TE.to(accumulation_dtype(gate_up_TE.dtype)).chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=limit), up_TF.clamp(-limit, limit)
    return ((up_TF + 1) * (gate_TF * torch.sigmoid(alpha * gate_TF))).to(gate_up_TE.dtype)


@op("sigmoid_mul")
def sigmoid_mul(x_TM: torch.Tensor, gate_TM: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), [T, M], in x's dtype."""
    if kernels := kernels_for(x_TM, "gate"):
        found: torch.Tensor = kernels.sigmoid_mul(x_TM, gate_TM)
        return found
    return x_TM * torch.sigmoid(gate_TM)


@op("gated_add")
def gated_add(x_TD: torch.Tensor, y_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """Return x + sigmoid(gate) y, [T, D], with one gate per token."""
    return torch.addcmul(x_TD, _token_gate(gate_T1).to(x_TD.dtype), y_TD)


@op("scale_by_position")
def scale_by_position(
    x_TM: torch.Tensor, positions_T: torch.Tensor, period: int, factor: float
) -> torch.Tensor:
    """Return x (1 + factor log(1 + floor((position + 1) / period))), [T, M], in x's dtype. This
    keeps attention over long contexts sharp (arXiv 2501.19399)."""
    periods_T = ((positions_T + 1) // period).to(torch.float64)
    scales_T1 = (1 + factor * torch.log1p(periods_T))[:, None]
    exact = accumulation_dtype(x_TM.dtype)
    return (x_TM.to(exact) * scales_T1.to(exact)).to(x_TM.dtype)


@op("scale_by_top")
def scale_by_top(x_TD: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(largest logit of the token), [T, D], in x's dtype."""
    exact = accumulation_dtype(x_TD.dtype)
    gate_T1 = _token_gate(logits_TE.amax(dim=1, keepdim=True))
    return (x_TD.to(exact) * gate_T1.to(exact)).to(x_TD.dtype)


def _token_gate(x_T1: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of one number per token, in float64. In float32, torch's last bits depend
    on the number of tokens."""
    return x_T1.double().sigmoid()


@op("soft_cap")
def soft_cap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap), [R, V], in x's dtype."""
    if kernels := kernels_for(x_RV, "gate"):
        found: torch.Tensor = kernels.soft_cap(x_RV, cap)
        return found
    capped_RV = x_RV.to(accumulation_dtype(x_RV.dtype)) / cap
    return capped_RV.tanh_().mul_(cap).to(x_RV.dtype)


@op("concatenate")
def concatenate(x_TA: torch.Tensor, y_TB: torch.Tensor) -> torch.Tensor:
    """Concatenate the rows of x and y, [T, A + B]."""
    return torch.cat((x_TA, y_TB), dim=1)


@op("pad_width")
def pad_width(x_RN: torch.Tensor, width: int) -> torch.Tensor:
    """Pad rows to `width` columns with -inf, [R, width]."""
    return torch.nn.functional.pad(x_RN, (0, width - x_RN.shape[1]), value=-torch.inf)


@op("plain_ids")
def plain_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return token ids without the SECOND_TEXT mark, [T]."""
    return ids_T % SECOND_TEXT


@op("segment_ids")
def segment_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return the segment of each token, [T]: 0 for a pair's first text, 1 for its second."""
    return ids_T // SECOND_TEXT
