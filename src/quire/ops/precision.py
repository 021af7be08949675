"""The precision that sums are made in."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, else the type itself."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
