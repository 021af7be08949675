"""The gate of a feed-forward layer against the torch reference."""

import pytest
import torch

from quire.ops import silu_mul as reference
from quire.ops.host_memory import lazy_zeros
from quire.ops.kernels import silu_mul as kernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 4).to(dtype).to(device)


@pytest.mark.parametrize("shape", [(1, 2), (3, 128), (1, 2 * 1024), (2, 2 * 1025), (4, 2 * 100)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(*shape, seed=1, dtype=dtype, device=device)
    before = x.clone()
    found = kernels.silu_mul(x)
    wanted = reference.silu_mul(x)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(x, before)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = numbers(3, 80, seed=2, dtype=torch.float32, device=device)
    found = kernels.silu_mul(wide[:, 8:72])
    torch.testing.assert_close(found, reference.silu_mul(wide[:, 8:72]), atol=2e-6, rtol=2e-6)


def test_rows_beyond_32_bits(device: torch.device) -> None:
    far = lazy_zeros((2**31 + 16,), torch.float16, device).as_strided((3, 16), (2**30, 1))
    far[2] = torch.arange(16.0)
    torch.testing.assert_close(kernels.silu_mul(far), reference.silu_mul(far))


def test_no_rows(device: torch.device) -> None:
    assert kernels.silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


def test_gates_of_any_size(device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -88.0, -0.0, 88.0, 1e4, float("nan")]], device=device)
    found = kernels.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert found[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.0, 88.0, 1e4], abs=1e-30)
    assert found[0, 5].isnan()
