"""Blocks of the C++ core as other backends have them."""

import torch


def row_by_row(kv: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Turn the keys of [2, Y, K, B, P, H] back: the core has the words of a block's rows as [W, P],
    and the scale of int8 before the numbers (csrc/attention.h). Rows must be whole words."""
    keys = kv[0].contiguous()
    block_size = keys.shape[-2]
    words = keys.flatten(-2).view(torch.int32).unflatten(-1, (-1, block_size))
    rows = words.transpose(-1, -2).contiguous().view(keys.dtype)
    if kv_format == "int8":
        rows = torch.cat([rows[..., 4:], rows[..., :4]], dim=-1)
    return torch.stack([rows, kv[1]])
