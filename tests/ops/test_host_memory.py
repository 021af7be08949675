"""Alignment of zeroed memory of the CPU."""

import pytest
import torch

from quire.ops.host.host_memory import lazy_zeros
from quire.ops.host.pages import ALIGNMENT, HUGE_PAGE


@pytest.mark.parametrize(
    ("shape", "alignment"),
    [((3,), ALIGNMENT), ((5, 7, 1001), ALIGNMENT), ((3, 1 << 20), HUGE_PAGE)],
)
def test_zeros_are_aligned_to_cache_lines_and_large_ones_to_huge_pages(
    shape: tuple[int, ...], alignment: int
) -> None:
    """A block of a KV pool would otherwise occupy one more cache line and page."""
    zeros = [lazy_zeros(shape, torch.bfloat16, torch.device("cpu")) for _ in range(3)]
    for tensor in zeros:
        assert tensor.data_ptr() % alignment == 0
        assert tensor.shape == shape and tensor.is_contiguous()
        assert not tensor.any()
