"""Compare RMS normalisation with the torch reference."""

import pytest
import torch

from quire.ops import norms as reference
from quire.ops.kernels import norm
from quire.ops.norms import gated_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (5, 128), (2, 1000)])
def test_rms_norm_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x = numbers(*shape, seed=1, dtype=dtype, device=device) * 3
    weight = numbers(shape[-1], seed=2, dtype=dtype, device=device)
    wanted = reference.rms_norm(x, weight, 1e-5)
    found = norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_weight_may_have_more_precision_than_the_input(device: torch.device) -> None:
    x = numbers(3, 100, seed=1, dtype=torch.float16, device=device)
    weight = 1.0 + numbers(100, seed=2, dtype=torch.float32, device=device)
    found, tolerance = norm.rms_norm(x, weight, 1e-5), TOLERANCE[torch.float16]
    assert found.dtype == torch.float16
    wanted = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_each_head_may_have_its_own_weight(dtype: torch.dtype, device: torch.device) -> None:
    """Queries and keys share one call, and are a slice of a wider tensor."""
    qkv = numbers(3, 6, 16, seed=3, dtype=dtype, device=device)
    weight = numbers(4, 16, seed=4, dtype=dtype, device=device)
    wanted = reference.rms_norm(qkv[:, :4], weight, 1e-6)
    found = norm.rms_norm(qkv[:, :4], weight, 1e-6)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(1, 64), (4, 96)])
def test_add_rms_norm_equals_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = (numbers(*shape, seed=i, dtype=dtype, device=device) for i in (5, 6))
    weight = numbers(shape[-1], seed=7, dtype=dtype, device=device)
    before = x.clone(), residual.clone()
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5)
    found = norm.add_rms_norm(x, residual, weight, 1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("shape", [(1, 1, 128), (3, 5, 20), (2, 40, 64)])
@pytest.mark.parametrize("has_float32_weight", [False, True])
def test_gated_norm_equals_the_reference(
    shape: tuple[int, int, int], has_float32_weight: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Inputs are slices of a wider tensor, as of a shared projection."""
    tokens, heads, size = shape
    wide = numbers(tokens, 2 * heads * size + 7, seed=1, dtype=dtype, device=device) * 3
    x, gate = (part.unflatten(1, (heads, size)) for part in wide[:, 7:].split(heads * size, dim=1))
    kind = torch.float32 if has_float32_weight else dtype
    weight = numbers(size, seed=2, dtype=kind, device=device)
    found, wanted = (
        norm.gated_norm(x, gate, weight, 1e-6),
        gated_norm(x.cpu(), gate.cpu(), weight.cpu(), 1e-6),
    )
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype] / (1 if dtype == torch.float32 else 4)
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=2 * tolerance)


def test_gated_norm_of_no_vectors_is_empty(device: torch.device) -> None:
    x = torch.empty(0, 3, 16, device=device)
    assert norm.gated_norm(x, x, torch.ones(16, device=device), 1e-6).shape == (0, 3, 16)
