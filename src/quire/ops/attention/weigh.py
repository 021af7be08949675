"""Attention over contiguous keys and values, by torch operations: what is left after the gather.

Shape legend: R rows, Q queries of a row, K KV heads, G query heads of one KV head, J = G * Q,
B = K * R, C context tokens, H head dim, N = K * G. The G query heads of a KV head are taken as
further queries of it, so keys and values are never repeated.
"""

import torch

from quire.ops.attention_inputs import Scores
from quire.ops.precision import accumulation_dtype


def weigh(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Compute softmax(scores + bias) v as [R, Q, K, G, H], of scores as `Scores` says."""
    is_slow = k_KRCH.device.type == "cpu" and k_KRCH.dtype.itemsize == 2
    if scores.soft_cap is None and scores.sinks_N is None and not is_slow:
        return _by_fused_operation(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scores.scale)
    # The fused operation has neither; and on a CPU it multiplies 16-bit numbers slowly: matrix
    # products of them are three times as fast.
    return _by_products(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scores)


def weigh_part(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same without sinks, and the logarithms [R, Q, K, G] of the sums of e^score, both
    in the type that sums are made in."""
    rows, queries, heads, group, size = q_RQKGH.shape
    scores_BJC = _score(q_RQKGH, k_KRCH, bias_R1QC, scores)
    scores_BJC = scores_BJC.to(accumulation_dtype(scores_BJC.dtype))
    log_sums_BJ1 = scores_BJC.logsumexp(-1, keepdim=True)
    weights_BJC = (scores_BJC - log_sums_BJ1).exp()
    out_BJH = torch.bmm(weights_BJC, v_KRCH.flatten(0, 1).to(weights_BJC.dtype))
    out_RQKGH, log_sums_RQKG1 = (
        x_BJX.view(heads, rows, group, queries, -1).permute(1, 3, 0, 2, 4)
        for x_BJX in (out_BJH, log_sums_BJ1)
    )
    return out_RQKGH, log_sums_RQKG1[..., 0]


def _score(
    q_RQKGH: torch.Tensor, k_KRCH: torch.Tensor, bias_R1QC: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Return the scores [B, J, C], rounded to the dtype if there is no soft cap."""
    rows, queries, heads, group, size = q_RQKGH.shape
    q_BJH = q_RQKGH.permute(2, 0, 3, 1, 4).reshape(heads * rows, group * queries, size)
    k_BHC = k_KRCH.flatten(0, 1).transpose(1, 2)
    # One row's bias is broadcast over the heads by the product itself.
    bias_BJC = bias_R1QC.expand(heads if rows > 1 else 1, rows, group, queries, -1)
    bias_BJC = bias_BJC.reshape(-1, group * queries, k_BHC.shape[2])
    cap = scores.soft_cap
    beta = 1 if cap is None else 0
    scores_BJC = torch.baddbmm(bias_BJC, q_BJH, k_BHC, beta=beta, alpha=scores.scale)
    if cap is not None:
        dtype = accumulation_dtype(q_BJH.dtype)
        scores_BJC = torch.tanh(scores_BJC.to(dtype) / cap) * cap + bias_BJC
    return scores_BJC


def _by_products(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Compute it by products: scores and weights are rounded to the dtype at least once, the sums
    within each operation are not."""
    rows, queries, heads, group, size = q_RQKGH.shape
    scores_BJC = _score(q_RQKGH, k_KRCH, bias_R1QC, scores)
    v_BCH, dtype = v_KRCH.flatten(0, 1), accumulation_dtype(q_RQKGH.dtype)
    if scores.sinks_N is None:
        weights_BJC = scores_BJC.softmax(-1)
    else:
        # A sink is one more key, without a value.
        sinks_KRGQ = scores.sinks_N.view(heads, 1, group, 1).expand(-1, rows, -1, queries)
        sinks_BJ1 = sinks_KRGQ.reshape(heads * rows, group * queries, 1)
        weights_BJC = torch.cat([scores_BJC.to(dtype), sinks_BJ1.to(dtype)], -1).softmax(-1)
        weights_BJC = weights_BJC[..., :-1]
    out_BJH = torch.bmm(weights_BJC.to(v_BCH.dtype), v_BCH)
    return out_BJH.view(heads, rows, group, queries, size).permute(1, 3, 0, 2, 4)


def _by_fused_operation(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    rows, queries, heads, group, size = q_RQKGH.shape
    q_RKJH = q_RQKGH.permute(0, 2, 3, 1, 4).reshape(rows, heads, group * queries, size)
    bias_R1JC = bias_R1QC.repeat(1, 1, group, 1)
    out_RKJH = torch.nn.functional.scaled_dot_product_attention(
        q_RKJH, k_KRCH.transpose(0, 1), v_KRCH.transpose(0, 1), attn_mask=bias_R1JC, scale=scale
    )
    return out_RKJH.view(rows, heads, group, queries, size).permute(0, 3, 1, 2, 4)
