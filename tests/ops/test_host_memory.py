"""Memory of the CPU."""

import pytest
import torch

from quire.ops.host.host_memory import lazy_zeros
from quire.ops.host.pages import ALIGNMENT, HUGE_PAGE


@pytest.mark.parametrize(
    ("shape", "alignment"),
    [((3,), ALIGNMENT), ((5, 7, 1001), ALIGNMENT), ((3, 1 << 20), HUGE_PAGE)],
)
def test_zeros_begin_at_a_line_and_many_at_a_large_page(
    shape: tuple[int, ...], alignment: int
) -> None:
    """A block of a KV pool would otherwise stand in one more line of the cache, and page."""
    zeros = [lazy_zeros(shape, torch.bfloat16, torch.device("cpu")) for _ in range(3)]
    for tensor in zeros:
        assert tensor.data_ptr() % alignment == 0
        assert tensor.shape == shape and tensor.is_contiguous()
        assert not tensor.any()
