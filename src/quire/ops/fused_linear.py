"""Linear layers fused with their neighbours: the norm before them, and the gate or the residual
addition after them.

Shape legend: T tokens, D model dim, I inputs, O outputs, F feed-forward dim, E = 2 F or O.

With one or two rows on a GPU, a small operation takes as long as its launch. These are 2 us, in
which a product reads 8 MB. `kernels/few_rows.py` computes each operation here in one launch. Models
call them where `fuses` allows it, and the separate operations elsewhere. The normalised numbers are
not rounded before the product, so results may differ in the last place. With 5 to 64 rows
`kernels/products/stream_k.py` computes a product and its gate in one launch (`gates`).
"""

from collections.abc import Callable

import torch

from quire.ops.elementwise import add, gelu_mul, gelu_tanh_mul, silu_mul
from quire.ops.gpu import kernels_for
from quire.ops.linear import linear
from quire.ops.norms import rms_norm
from quire.ops.precision import FixedOrderWeight
from quire.ops.registry import op
from quire.ops.weights.device_weights import Weight
from quire.ops.weights.opaque import OpaqueWeight

Gate = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[Gate, str] = {silu_mul: "silu", gelu_mul: "gelu", gelu_tanh_mul: "gelu_tanh"}


def fuses(x_TD: torch.Tensor, weight_EI: Weight, *, has_norm: bool = False) -> bool:
    """Return whether a kernel fuses the product of T tokens and the weight [E, I]. With has_norm,
    it must fuse the norm before the product, else the addition after it. x: any tensor [T, D] of
    these tokens, in the layer's dtype. Weights of a fixed order, and quantised weights, have
    kernels of their own."""
    if isinstance(weight_EI, OpaqueWeight | FixedOrderWeight):
        return False
    kernels = kernels_for(x_TD, "few_rows")
    return kernels is not None and bool(kernels.fuses(x_TD, weight_EI, has_norm))


def gates(x_TD: torch.Tensor, weight_ED: Weight) -> bool:
    """Return whether a kernel fuses the product of x [T, D] and the weight [E, D] with the gate
    after it. Nothing is normalised."""
    if isinstance(weight_ED, OpaqueWeight | FixedOrderWeight):
        return False
    kernels = kernels_for(x_TD, "products.stream_k")
    return kernels is not None and bool(kernels.serves(x_TD, weight_ED))


@op("linear_gate")
def linear_gate(
    x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None, gate: Gate
) -> torch.Tensor:
    """Return gate(x W^T + b), [T, F]. gate: as in `normed_gate`."""
    if gates(x_TD, weight_ED) and (kernels := kernels_for(x_TD, "products.stream_k")):
        found: torch.Tensor = kernels.gated(x_TD, weight_ED, bias_E, ACTIVATIONS[gate])
        return found
    return gate(linear(x_TD, weight_ED, bias_E))


@op("normed_linear")
def normed_linear(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rms_norm(x) W^T + b, [T, O], in x's dtype. norm: weight of the norm."""
    if fuses(x_TD, weight_OD, has_norm=True) and (kernels := kernels_for(x_TD, "few_rows")):
        found: torch.Tensor = kernels.normed(x_TD, norm_D, eps, weight_OD, bias_O)
        return found
    return linear(rms_norm(x_TD, norm_D, eps), weight_OD, bias_O)


@op("normed_gate")
def normed_gate(
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    eps: float,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None,
    gate: Gate,
) -> torch.Tensor:
    """Return gate(rms_norm(x) W^T + b), [T, F]. gate: one of ACTIVATIONS, of concatenated gate and
    up, which are rounded to x's dtype."""
    if fuses(x_TD, weight_ED, has_norm=True) and (kernels := kernels_for(x_TD, "few_rows")):
        activation, norm = ACTIVATIONS[gate], (norm_D, eps)
        found: torch.Tensor = kernels.normed(x_TD, *norm, weight_ED, bias_E, activation)
        return found
    return gate(linear(rms_norm(x_TD, norm_D, eps), weight_ED, bias_E))


@op("linear_add")
def linear_add(
    x_TI: torch.Tensor,
    weight_DI: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual_TD: torch.Tensor,
) -> torch.Tensor:
    """Return x W^T + b + residual, [T, D]. The product is rounded to x's dtype before the sum."""
    if fuses(x_TI, weight_DI) and (kernels := kernels_for(x_TI, "few_rows")):
        found: torch.Tensor = kernels.added(x_TI, weight_DI, bias_D, residual_TD)
        return found
    return add(linear(x_TI, weight_DI, bias_D), residual_TD)
