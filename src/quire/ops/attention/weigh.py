"""Attention over contiguous keys and values, by torch operations: what is left after the gather.

Shape legend: R rows, Q queries of a row, K KV heads, G query heads of one KV head, J = G * Q,
C context tokens, H head dim. The G query heads of a KV head are taken as further queries of it, so
keys and values are never repeated.
"""

import torch


def weigh(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    hidden_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(q k^T * scale) v as [R, Q, K, G, H]; `hidden` is True where a query may not look."""
    if k_KRCH.device.type == "cpu" and k_KRCH.dtype.itemsize == 2:
        # On a CPU the fused operation below multiplies 16-bit numbers slowly; matrix products
        # of them are three times as fast.
        return _by_products(q_RQKGH, k_KRCH, v_KRCH, hidden_R1QC, scale)
    return _by_fused_operation(q_RQKGH, k_KRCH, v_KRCH, hidden_R1QC, scale)


def _by_products(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    hidden_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Scores are products in the inputs' dtype; their softmax is made in float32."""
    rows, queries, heads, group, size = q_RQKGH.shape
    context = k_KRCH.shape[2]
    q_BJH = q_RQKGH.permute(2, 0, 3, 1, 4).reshape(heads * rows, group * queries, size)
    k_BCH, v_BCH = k_KRCH.flatten(0, 1), v_KRCH.flatten(0, 1)
    scores = torch.bmm(q_BJH, k_BCH.transpose(1, 2)).float().mul_(scale)
    scores.view(heads, rows, group, queries, context).masked_fill_(hidden_R1QC, -torch.inf)
    out_BJH = torch.bmm(scores.softmax(-1).to(v_BCH.dtype), v_BCH)
    return out_BJH.view(heads, rows, group, queries, size).permute(1, 3, 0, 2, 4)


def _by_fused_operation(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    hidden_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    rows, queries, heads, group, size = q_RQKGH.shape
    q_RKJH = q_RQKGH.permute(0, 2, 3, 1, 4).reshape(rows, heads, group * queries, size)
    seen_R1JC = ~hidden_R1QC.repeat(1, 1, group, 1)
    out_RKJH = torch.nn.functional.scaled_dot_product_attention(
        q_RKJH, k_KRCH.transpose(0, 1), v_KRCH.transpose(0, 1), attn_mask=seen_R1JC, scale=scale
    )
    return out_RKJH.view(rows, heads, group, queries, size).permute(0, 3, 1, 2, 4)
