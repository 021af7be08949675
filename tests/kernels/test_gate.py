"""Compare the gates of feed-forward layers and the soft cap of logits with torch's."""

import pytest
import torch

from quire.ops.elementwise import (
    clamped_gate,
    gelu_mul,
    gelu_tanh_mul,
    sigmoid_mul,
    silu_mul,
    soft_cap,
)
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.kernels import gate as kernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


GATES = {"silu_mul": silu_mul, "gelu_mul": gelu_mul, "gelu_tanh_mul": gelu_tanh_mul}


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 4).to(dtype).to(device)


@pytest.mark.parametrize("shape", [(1, 2), (3, 128), (1, 2 * 1024), (2, 2 * 1025), (4, 2 * 100)])
@pytest.mark.parametrize("gate", GATES)
def test_gate_equals_the_reference(
    gate: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x = numbers(*shape, seed=1, dtype=dtype, device=device)
    before = x.clone()
    found = getattr(kernels, gate)(x)
    wanted = GATES[gate](x)
    # 1 + erf(x) loses digits where x is far below 0, in torch's operation too.
    atol = TOLERANCE[dtype] * (1 if gate == "silu_mul" else 4)
    torch.testing.assert_close(found, wanted, atol=atol, rtol=TOLERANCE[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(3, 128), (2, 2 * 1025)])
def test_clamped_gate_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x = numbers(*shape, seed=1, dtype=dtype, device=device)
    x[0, :2] = torch.tensor([torch.nan, -1e4])
    found, tolerance = kernels.clamped_gate(x, 1.7, 3.0), TOLERANCE[dtype]
    wanted = clamped_gate(x, 1.7, 3.0)
    assert found[0, 0].isnan() and found[0, 1] == 0
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 2), (3, 128), (2, 1025)])
def test_sigmoid_mul_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Operands are slices of a wider tensor, as queries and their gates share a projection."""
    wide = numbers(shape[0], 2 * shape[1] + 3, seed=4, dtype=dtype, device=device)
    x, gate = wide[:, 3:].split(shape[1], dim=1)
    found, wanted = kernels.sigmoid_mul(x, gate), sigmoid_mul(x.cpu(), gate.cpu())
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-7, rtol=TOLERANCE[dtype])
    assert kernels.sigmoid_mul(x[:0], gate[:0]).shape == (0, shape[1])


def test_gate_takes_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = numbers(3, 80, seed=2, dtype=torch.float32, device=device)
    found = kernels.silu_mul(wide[:, 8:72])
    torch.testing.assert_close(found, silu_mul(wide[:, 8:72]), atol=2e-6, rtol=2e-6)


def test_row_offsets_may_exceed_32_bits(device: torch.device) -> None:
    far = lazy_zeros((2**31 + 16,), torch.float16, device).as_strided((3, 16), (2**30, 1))
    far[2] = torch.arange(16.0)
    torch.testing.assert_close(kernels.silu_mul(far), silu_mul(far))


def test_no_rows_give_no_rows(device: torch.device) -> None:
    assert kernels.silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize("name", GATES)
def test_gates_are_accurate_for_extreme_inputs(name: str, device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -88.0, -0.0, 88.0, 1e4, float("nan")]], device=device)
    found = getattr(kernels, name)(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert found[0, :5].tolist() == pytest.approx([0.0, 0.0, 0.0, 88.0, 1e4], abs=1e-30)
    assert found[0, 5].isnan()


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap_equals_the_reference(
    cap: float, dtype: torch.dtype, device: torch.device
) -> None:
    x = numbers(3, 1025, seed=3, dtype=dtype, device=device)
    found = kernels.soft_cap(x, cap)
    torch.testing.assert_close(found, soft_cap(x, cap), atol=1e-7, rtol=TOLERANCE[dtype])


def test_soft_cap_is_accurate_for_inputs_of_any_size(device: torch.device) -> None:
    """Small inputs keep their precision."""
    x = torch.logspace(-7, 7, 3001, device=device)
    x = torch.cat((x, -x, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=device)))
    wanted = (30.0 * torch.tanh(x.double() / 30.0)).float()
    torch.testing.assert_close(kernels.soft_cap(x, 30.0), wanted, atol=0, rtol=5e-7, equal_nan=True)
    torch.testing.assert_close(soft_cap(x, 30.0), wanted, atol=0, rtol=5e-7, equal_nan=True)
