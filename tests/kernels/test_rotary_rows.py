"""Compare the rotation's factors with float64, and check when the operation uses the kernel."""

import math

import pytest
import torch

from quire.ops import gpu
from quire.ops import rotary as reference
from quire.ops.kernels import rotary_rows as kernels
from quire.ops.registry import record_ops

POSITIONS = torch.cat((torch.arange(25), torch.arange(-3, 0), 97 + torch.arange(0, 2**20, 39_989)))


def frequencies_of(num: int, num_still: int = 0) -> torch.Tensor:
    """Return frequencies of plain rotation; the last `num_still` are 0."""
    frequencies = 10_000.0 ** -(torch.arange(num, dtype=torch.float64) / num)
    frequencies[num - num_still :] = 0.0
    return frequencies


def exact(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the factors in float64, computed on the CPU."""
    return reference.rotary_rows(positions.cpu(), frequencies.cpu(), scale, torch.float64)


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that factors are the nearest float32 or its neighbour, almost all the nearest."""
    found, nearest = found.cpu(), exact.float()
    assert found.dtype == torch.float32 and found.is_contiguous() and found.shape == exact.shape
    infinity = torch.tensor(math.inf)
    lower, upper = torch.nextafter(nearest, -infinity), torch.nextafter(nearest, infinity)
    assert bool(((lower <= found) & (found <= upper)).all())
    assert int((found != nearest).sum()) <= 1e-4 * found.numel()


@pytest.mark.parametrize("scale", [1.0, 1.3689])  # float32 would round the second
@pytest.mark.parametrize(("num", "num_still"), [(64, 0), (1, 0), (40, 15), (300, 0), (4001, 1)])
def test_factors_equal_float64_within_one_float32_step(
    num: int, num_still: int, scale: float, device: torch.device
) -> None:
    frequencies = frequencies_of(num, num_still).to(device)
    positions = POSITIONS.to(device)
    found = kernels.rotary_rows(positions, frequencies, scale)
    check(found, exact(positions, frequencies, scale))
    cos, sin = found.view(len(positions), 2, 2, num).unbind(dim=1)
    assert bool((cos[..., num - num_still :] == 1).all()), "neither rotated nor scaled"
    assert bool((sin[..., num - num_still :] == 0).all())


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_factors_of_few_or_strided_positions_equal_float64(
    num_tokens: int, position_dtype: torch.dtype, device: torch.device
) -> None:
    positions = (torch.arange(40, device=device) * 25_000).to(position_dtype)
    frequencies = frequencies_of(32).to(device)
    for some in (positions[:num_tokens], positions[: 2 * num_tokens : 2]):
        found = kernels.rotary_rows(some, frequencies, 1.5)
        check(found, exact(some, frequencies, 1.5))


def test_factors_of_positions_up_to_2_31_are_close_to_float64(device: torch.device) -> None:
    """Float64 itself rounds these angles by 10^-7."""
    positions = torch.tensor([2**31 - 1, 2**30 + 7, 2**21 + 1], device=device)
    frequencies = frequencies_of(64).to(device)
    found = kernels.rotary_rows(positions, frequencies, 1.0).cpu()
    torch.testing.assert_close(
        found.double(), exact(positions, frequencies, 1.0), atol=1e-6, rtol=0.0
    )


def test_factors_of_the_largest_step_equal_float64(device: torch.device) -> None:
    positions, frequencies = torch.arange(8193, device=device), frequencies_of(2).to(device)
    found = kernels.rotary_rows(positions, frequencies, 1.0)
    check(found, exact(positions, frequencies, 1.0))


@pytest.mark.parametrize(
    ("dtype", "is_served"),
    [(torch.float32, True), (torch.float16, True), (torch.bfloat16, True), (torch.float64, False)],
)
def test_operation_uses_the_kernel_except_in_float64(
    dtype: torch.dtype, is_served: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return rotary_rows(*arguments)

    rotary_rows = kernels.rotary_rows
    monkeypatch.setattr(kernels, "rotary_rows", counted)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    positions, frequencies = torch.arange(5, device=device), frequencies_of(8).to(device)
    with record_ops() as record:
        found = reference.rotary_rows(positions, frequencies, 1.25, dtype)
    assert record.names == ["rotary_rows"] and len(calls) == is_served
    wanted = torch.float32 if is_served else torch.float64
    assert found.dtype == wanted and found.shape == (5, 1, 32)
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    by_torch = reference.rotary_rows(positions, frequencies, 1.25, dtype)
    assert len(calls) == is_served and by_torch.dtype == wanted
    torch.testing.assert_close(found, by_torch, atol=2e-7, rtol=0.0)


def test_each_frequency_uses_the_position_on_its_axis(device: torch.device) -> None:
    """Equal positions on all axes give the bits of a rotation without axes."""
    axes = torch.arange(40, device=device) % 3
    frequencies = frequencies_of(40, 5).to(device)
    by_axis = torch.where(torch.arange(3, device=device)[:, None] == axes, frequencies, 0.0)
    positions = torch.stack([POSITIONS, POSITIONS.flip(0), POSITIONS + 7]).to(device)
    found = kernels.rotary_rows(positions, by_axis, 1.5)
    check(found, exact(positions, by_axis, 1.5))
    for axis, alone in enumerate(positions):
        wanted = kernels.rotary_rows(alone, frequencies, 1.5).view(-1, 4, 40)
        assert torch.equal(found.view(-1, 4, 40)[..., axes == axis], wanted[..., axes == axis])
    plain = kernels.rotary_rows(positions[0], frequencies, 1.5)
    assert torch.equal(kernels.rotary_rows(positions[0], by_axis, 1.5), plain)
    same = positions[0].expand(3, -1)
    assert torch.equal(kernels.rotary_rows(same, by_axis, 1.5), plain)
