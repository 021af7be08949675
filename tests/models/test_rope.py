"""Rotary embeddings that pair neighbours or turn a part of each head, by an order of rows.

Covers `base/rope_options.py`.
"""

import pytest
import torch

from quire.base.config_fields import Fields
from quire.base.rope_options import RopeOptions, rope_options
from quire.models.rope import head_order, rope_frequencies, rows_of_heads
from quire.ops.rotary import rotary, rotary_rows


def turned_by_pairs(
    x_TNH: torch.Tensor, angles_TE: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """By complex numbers, with the checkpoint's own order of dimensions."""
    out, half = x_TNH.clone(), angles_TE.shape[1]
    for e in range(half):
        i, j = (2 * e, 2 * e + 1) if interleaved else (e, e + half)
        points = torch.complex(x_TNH[..., i], x_TNH[..., j])
        points = points * torch.exp(1j * angles_TE[:, None, e])
        out[..., i], out[..., j] = points.real, points.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [12, 8, 2])
def test_dot_products_are_those_of_the_pairs(rotated: int, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 7, 3, 12, generator=generator, dtype=torch.float64)
    options = RopeOptions("default", 100.0, rotated, scale=1.0)
    frequencies = rope_frequencies(options, 12)
    assert (frequencies > 0).sum() == rotated // 2
    positions = torch.arange(7)
    angles_TE = positions[:, None] * frequencies[: rotated // 2]
    wanted_q, wanted_k = (turned_by_pairs(each, angles_TE, interleaved) for each in (q, k))
    order = head_order(12, rotated, interleaved=interleaved)
    assert (order is None) == (rotated == 12 and not interleaved)
    order = torch.arange(12) if order is None else order
    rows = rotary_rows(positions, frequencies, 1.0, torch.float64)
    got_q, got_k = rotary(q[..., order], rows), rotary(k[..., order], rows)
    wanted = torch.einsum("snh,tnh->nst", wanted_q, wanted_k)
    torch.testing.assert_close(torch.einsum("snh,tnh->nst", got_q, got_k), wanted)
    assert rows_of_heads(order, 2).tolist() == [*order.tolist(), *(12 + order).tolist()]


def test_what_is_not_turned_is_not_scaled() -> None:
    frequencies = rope_frequencies(RopeOptions("default", 100.0, 4), 8)
    x = torch.ones(1, 1, 8, dtype=torch.float64)
    got = rotary(x, rotary_rows(torch.zeros(1, dtype=torch.int64), frequencies, 3.0, x.dtype))
    assert got.flatten().tolist() == [3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0]


def test_the_part_that_is_turned() -> None:
    assert rope_options(Fields({}), 64, 128, default_part=0.25).rotated == 16
    inner = Fields({"rope_parameters": {"partial_rotary_factor": 0.5}})
    assert rope_options(inner, 64, 128, default_part=0.25).rotated == 32
