"""Stored KV rows as operands of attention's products: fp8 is exact in float16."""

import pytest
import torch
import triton
import triton.language as tl

from quire.ops.kernels.attention.attention_write import as_float16, load_rows
from quire.ops.kernels.launch import INTERPRETED


@triton.jit
def _load_kernel(rows_ptr, out_ptr, DOT: tl.constexpr):
    slot, h = tl.arange(0, 16), tl.arange(0, 16)
    x = load_rows(rows_ptr, slot, slot >= 0, 16, 16, 4, 16, 2, DOT, True)
    tl.store(out_ptr + slot[:, None] * 16 + h[None, :], x)


@triton.jit
def _scale_kernel(q_ptr, out_ptr, factors_ptr, factor, ROWS: tl.constexpr):
    m, h = tl.arange(0, ROWS), tl.arange(0, 16)
    at = m[:, None] * 16 + h[None, :]
    scaled, factors = as_float16(tl.load(q_ptr + at), factor)
    tl.store(out_ptr + at, scaled)
    tl.store(factors_ptr + m[:, None], factors)


def scaled_rows(q: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of 16 numbers as float16, and their factors."""
    out = torch.empty(q.shape, dtype=torch.float16, device=q.device)
    factors = torch.empty(len(q), 1, device=q.device)
    _scale_kernel[(1,)](q, out, factors, factor, len(q))
    return out, factors


def test_every_fp8_value_is_exact_in_float16(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    found = torch.empty(256, dtype=torch.float16, device=device)
    _load_kernel[(1,)](codes, found, tl.float16)
    wanted = codes.view(torch.float8_e4m3fn).double()
    is_nan = wanted.isnan()
    assert int(is_nan.sum()) == 2
    assert torch.equal(found.double()[~is_nan], wanted[~is_nan])
    assert INTERPRETED or found[is_nan].isnan().all()  # the interpreter has no NaN of e4m3


@pytest.mark.parametrize("exponent", range(-110, 120, 23))
def test_scaled_queries_of_any_range_are_exact(exponent: int, device: torch.device) -> None:
    """Values of bfloat16; the largest of a row is up to 2^28 times the smallest."""
    generator = torch.Generator().manual_seed(exponent + 200)
    leading = torch.randint(128, 256, (16, 16), generator=generator) / 128.0
    sign = torch.randint(0, 2, (16, 16), generator=generator) * 2.0 - 1.0
    powers = torch.randint(exponent - 28, exponent + 1, (16, 16), generator=generator)
    q = (sign * leading * 2.0 ** powers.double()).float()
    q[3, 5] = 0.0
    q = q.where(q.abs() > 1e-37, torch.zeros(()))  # drop values that are near subnormal
    assert torch.equal(q, q.bfloat16().float())
    scaled, factors = scaled_rows(q.to(device), 0.5)
    assert float(scaled.abs().max()) < 2**15
    assert torch.equal(scaled.double() * factors.double() * 2, q.to(device).double())


def test_scaled_queries_keep_zeros_nan_and_infinity(device: torch.device) -> None:
    q = torch.zeros(4, 16, device=device)
    q[1, 2], q[2, 3] = torch.nan, torch.inf
    q[3, 4] = 1e-38
    scaled, factors = scaled_rows(q, 1.0)
    assert not scaled[0].any() and torch.isfinite(factors[0]).all()
    assert scaled[1].isnan().any() and not torch.isfinite(scaled[2]).all()
    assert torch.isfinite(scaled[3]).all()
