"""Blocks of the C++ core and int8 blocks of a GPU, changed to rows with their scales."""

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


def scales_in_rows(kv: torch.Tensor) -> torch.Tensor:
    """Move each scale after its row: blocks [..., P, H + 4] of a GPU have all scales after all rows
    (ops/kernels/attention/attention_write.py)."""
    block_size, row = kv.shape[-2:]
    rows, scales = kv.flatten(-2).split([block_size * (row - 4), block_size * 4], dim=-1)
    parts = rows.unflatten(-1, (block_size, -1)), scales.unflatten(-1, (block_size, 4))
    return torch.cat(parts, dim=-1)


def scales_after_rows(kv: torch.Tensor) -> torch.Tensor:
    """Undo `scales_in_rows`."""
    return torch.cat([kv[..., :-4].flatten(-2), kv[..., -4:].flatten(-2)], -1).view(kv.shape)
