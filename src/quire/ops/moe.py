"""Mixtures of experts: the router's choice of experts, and the weighted sum of their results.

Shape legend: T tokens, E experts, C experts chosen per token, P = T C pairs of a token and an
expert, D model dim, F feed-forward dim of an expert, G = 2 F.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from quire.ops.adapters import ExpertAdapters
from quire.ops.elementwise import ClampedGate, silu_mul
from quire.ops.gpu import kernels_for
from quire.ops.linear import linear
from quire.ops.precision import FixedOrderWeight, accumulation_dtype
from quire.ops.registry import op
from quire.ops.weights.device_weights import Weight
from quire.ops.weights.gpu_weights import GPUWeight
from quire.spec.deepseek.routing import Routing

# The experts' weights: stacked in one tensor, or one result of `pack_weight` per expert.
ExpertWeights = torch.Tensor | GPUWeight | Sequence[Weight]
ExpertBiases = torch.Tensor | Sequence[torch.Tensor]

SMALLEST_SUM = 1e-20  # added to sums of sigmoids, which may all be 0

_num_real: ContextVar[torch.Tensor | None] = ContextVar("quire_num_real_tokens", default=None)


@contextmanager
def only_first_tokens(num_real: torch.Tensor) -> Iterator[None]:
    """Let `moe_experts` compute only the first num_real[0] tokens of each call within this context.
    The others are padding: they read no expert's weights, and their results have any values.
    num_real: int32 [1], read when the work runs."""
    token = _num_real.set(num_real)
    try:
        yield
    finally:
        _num_real.reset(token)


@op("moe_route")
def moe_route(
    logits_TE: torch.Tensor, num_chosen: int, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts with the largest logits, int32 [T, C], and their weights [T, C].

    Experts are in order of falling logits; of equal logits the lower expert comes first. A weight
    is the expert's probability among all experts, or among the chosen experts if `normalises`.
    Weights are float32 (float64 for float64 logits).
    """
    if kernels := kernels_for(logits_TE, "moe"):
        routed: tuple[torch.Tensor, torch.Tensor]
        routed = kernels.moe_route(logits_TE, num_chosen, normalises)
        return routed
    scores_TE = logits_TE.to(accumulation_dtype(logits_TE.dtype))
    order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    ids_TC = order_TE[:, :num_chosen]
    weights_TC = scores_TE.softmax(dim=-1).gather(-1, ids_TC)
    if normalises:
        weights_TC = weights_TC / weights_TC.sum(dim=-1, keepdim=True)
    return ids_TC.int(), weights_TC


@op("moe_route_groups")
def moe_route_groups(
    logits_TE: torch.Tensor,
    num_chosen: int,
    normalises: bool,
    routing: Routing,
    bias_E: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's experts, int32 [T, C], and their weights [T, C], chosen as `Routing`
    says. Order, ties and dtype are as in `moe_route`. bias: added to scores for the choice, of
    the weights' dtype."""
    dtype = accumulation_dtype(logits_TE.dtype)
    scores_TE = logits_TE.to(dtype)
    if routing.is_sigmoid:
        # In float32, torch's sigmoids of a row have other last bits in other batches.
        scores_TE = scores_TE.double().sigmoid().to(dtype)
    else:
        scores_TE = scores_TE.softmax(dim=-1)
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if routing.num_groups > 1:
        grouped_TGE = ranked_TE.unflatten(1, (routing.num_groups, -1))
        best = grouped_TGE.topk(2 if routing.is_sigmoid else 1, dim=-1).values.sum(-1)
        groups = best.sort(dim=-1, descending=True, stable=True).indices
        is_left_TG = torch.ones_like(best, dtype=torch.bool)
        is_left_TG.scatter_(1, groups[:, : routing.num_chosen_groups], False)
        ranked_TE = grouped_TGE.masked_fill(is_left_TG[..., None], -torch.inf).flatten(1)
    order_TE = ranked_TE.sort(dim=-1, descending=True, stable=True).indices
    ids_TC = order_TE[:, :num_chosen]
    weights_TC = scores_TE.gather(-1, ids_TC)
    if normalises:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return ids_TC.int(), weights_TC * routing.scale


@op("moe_experts")
def moe_experts(
    x_TD: torch.Tensor,
    ids_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EGD: ExpertWeights,
    down_EDF: ExpertWeights,
    biases: tuple[ExpertBiases, ExpertBiases] | None = None,
    clamped: ClampedGate | None = None,
    first: int | None = None,
    adapted: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Return the weighted sum [T, D] of the results of each token's experts, in x's dtype.

    An expert is down(silu(gate(x)) * up(x)), or uses the gate `clamped`. biases: [E, G] and [E, D].
    first: number of this rank's first expert; experts of other ranks are not in the sum. None: this
    rank has all experts. adapted: adds the step's adapters to each expert's products.

    Only experts with tokens are computed. A token's sum follows the order of its ids, so the other
    tokens do not change it. With weights of fixed order their number does not change it either. The
    torch path waits for the device.
    """
    found: torch.Tensor
    num_experts = len(gate_up_EGD) if isinstance(gate_up_EGD, Sequence) else gate_up_EGD.shape[0]
    if first is not None:
        ids_TC = own_ids(ids_TC, first, num_experts)
    routed, num_real = (x_TD, ids_TC, weights_TC), _num_real.get()
    gate = silu_mul if clamped is None else clamped
    if isinstance(gate_up_EGD, GPUWeight) or isinstance(down_EDF, GPUWeight):
        kernels = kernels_for(x_TD, "quantised_moe")
        assert kernels is not None, f"no kernel for quantised experts on {x_TD.device}"
        found = kernels.moe_experts(
            *routed, gate_up_EGD, down_EDF, gate, biases, has_others=first is not None,
            num_real=num_real,
        )  # fmt: skip
        return found
    if isinstance(gate_up_EGD, torch.Tensor) and (kernels := kernels_for(x_TD, "moe")):
        is_fixed = isinstance(gate_up_EGD, FixedOrderWeight)
        found = kernels.moe_experts(
            *routed, gate_up_EGD, down_EDF, is_fixed, biases, clamped,
            has_others=first is not None, num_real=num_real,
        )  # fmt: skip
        return found
    if num_real is not None:
        is_real_T = torch.arange(len(ids_TC), device=ids_TC.device) < num_real
        ids_TC = torch.where(is_real_T[:, None], ids_TC, num_experts)
    num_chosen, flat_P = ids_TC.shape[1], ids_TC.flatten()
    counts_E = torch.bincount(flat_P, minlength=num_experts + 1).tolist()
    order_P = flat_P.argsort(stable=True)
    out_PD = x_TD.new_zeros(len(flat_P), x_TD.shape[1])
    for expert, pairs in enumerate(order_P.split(counts_E)):
        if len(pairs) and expert < num_experts:
            gate_up_bias, down_bias = (
                (None, None) if biases is None else (b[expert] for b in biases)
            )
            tokens = pairs // num_chosen
            x_PD = x_TD[tokens]
            both_PG = linear(x_PD, gate_up_EGD[expert], gate_up_bias)
            if adapted is not None:
                adapted.add(0, expert, both_PG, x_PD, tokens)
            inner_PF = gate(both_PG)
            own_PD = linear(inner_PF, down_EDF[expert], down_bias)
            if adapted is not None:
                adapted.add(1, expert, own_PD, inner_PF, tokens)
            out_PD[pairs] = own_PD
    return _weighted_sum(out_PD.view(-1, num_chosen, x_TD.shape[1]), weights_TC)


def own_ids(ids_TC: torch.Tensor, first: int, num_experts: int) -> torch.Tensor:
    """Number this rank's experts from 0, and all other experts `num_experts`; [T, C]."""
    own_TC = ids_TC - first
    is_here_TC = (own_TC >= 0) & (own_TC < num_experts)
    return torch.where(is_here_TC, own_TC, num_experts)


def _weighted_sum(out_TCD: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
    """Add the experts' results [T, C, D] in order of C, in the weights' precision."""
    total_TD = out_TCD[:, 0] * weights_TC[:, :1]
    for i in range(1, out_TCD.shape[1]):
        total_TD += out_TCD[:, i] * weights_TC[:, i : i + 1]
    return total_TD.to(out_TCD.dtype)
