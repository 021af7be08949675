"""Sums whose bits do not depend on which rank adds.

Shape legend: G ranks of the group.
"""

from collections.abc import Sequence

import torch


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors in their order; those of 16 bits as float32, rounded once."""
    first = parts[0]
    is_short = first.is_floating_point() and first.element_size() < 4
    total = first.float() if is_short else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
