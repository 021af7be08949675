"""Attention over contiguous keys and values, by torch operations: what is left after the gather.

Shape legend: R rows, Q queries of a row, K KV heads, G query heads of one KV head, J = G * Q,
B = K * R, C context tokens, H head dim. The G query heads of a KV head are taken as further queries
of it, so keys and values are never repeated.
"""

import torch


def weigh(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute softmax(q k^T * scale + bias) v as [R, Q, K, G, H]."""
    if k_KRCH.device.type == "cpu" and k_KRCH.dtype.itemsize == 2:
        # On a CPU the fused operation below multiplies 16-bit numbers slowly; matrix products
        # of them are three times as fast.
        return _by_products(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scale)
    return _by_fused_operation(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scale)


def _by_products(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute it by products: scores and weights are rounded to 16 bits, the sums within each
    operation are not."""
    rows, queries, heads, group, size = q_RQKGH.shape
    q_BJH = q_RQKGH.permute(2, 0, 3, 1, 4).reshape(heads * rows, group * queries, size)
    k_BCH, v_BCH = k_KRCH.flatten(0, 1), v_KRCH.flatten(0, 1)
    # One row's bias is broadcast over the heads by the product itself.
    bias_BJC = bias_R1QC.expand(heads if rows > 1 else 1, rows, group, queries, -1)
    bias_BJC = bias_BJC.reshape(-1, group * queries, k_BCH.shape[1])
    scores_BJC = torch.baddbmm(bias_BJC, q_BJH, k_BCH.transpose(1, 2), alpha=scale)
    out_BJH = torch.bmm(scores_BJC.softmax(-1), v_BCH)
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
