"""The factors of the rotation against torch's in float64, and which the operation takes."""

import math

import pytest
import torch

from quire.ops import gpu
from quire.ops import rotary as reference
from quire.ops.kernels import rotary_rows as kernels
from quire.ops.registry import record_ops

POSITIONS = torch.cat((torch.arange(25), torch.arange(-3, 0), 97 + torch.arange(0, 2**20, 39_989)))


def frequencies_of(num: int, num_still: int = 0) -> torch.Tensor:
    """Those of plain rotation, the last ones 0."""
    frequencies = 10_000.0 ** -(torch.arange(num, dtype=torch.float64) / num)
    frequencies[num - num_still :] = 0.0
    return frequencies


def exact(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    """In float64, on the CPU."""
    return reference.rotary_rows(positions.cpu(), frequencies.cpu(), scale, torch.float64)


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    """The nearest of float32, or the one beside it; almost all are the nearest."""
    found, nearest = found.cpu(), exact.float()
    assert found.dtype == torch.float32 and found.is_contiguous() and found.shape == exact.shape
    infinity = torch.tensor(math.inf)
    lower, upper = torch.nextafter(nearest, -infinity), torch.nextafter(nearest, infinity)
    assert bool(((lower <= found) & (found <= upper)).all())
    assert int((found != nearest).sum()) <= 1e-4 * found.numel()


@pytest.mark.parametrize("scale", [1.0, 1.3689])  # float32 would round the second
@pytest.mark.parametrize(("num", "num_still"), [(64, 0), (1, 0), (40, 15), (300, 0), (4001, 1)])
def test_factors_are_those_of_float64(
    num: int, num_still: int, scale: float, device: torch.device
) -> None:
    frequencies = frequencies_of(num, num_still).to(device)
    positions = POSITIONS.to(device)
    found = kernels.rotary_rows(positions, frequencies, scale)
    check(found, exact(positions, frequencies, scale))
    cos, sin = found.view(len(positions), 2, 2, num).unbind(dim=1)
    assert bool((cos[..., num - num_still :] == 1).all()), "neither turned nor scaled"
    assert bool((sin[..., num - num_still :] == 0).all())


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 17])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_few_tokens(num_tokens: int, position_dtype: torch.dtype, device: torch.device) -> None:
    """Also every second one of a longer list of positions."""
    positions = (torch.arange(40, device=device) * 25_000).to(position_dtype)
    frequencies = frequencies_of(32).to(device)
    for some in (positions[:num_tokens], positions[: 2 * num_tokens : 2]):
        found = kernels.rotary_rows(some, frequencies, 1.5)
        check(found, exact(some, frequencies, 1.5))


def test_positions_that_no_context_has_are_computed_too(device: torch.device) -> None:
    """Up to 2^31, with angles that float64 itself has rounded by 10^-7."""
    positions = torch.tensor([2**31 - 1, 2**30 + 7, 2**21 + 1], device=device)
    frequencies = frequencies_of(64).to(device)
    found = kernels.rotary_rows(positions, frequencies, 1.0).cpu()
    torch.testing.assert_close(
        found.double(), exact(positions, frequencies, 1.0), atol=1e-6, rtol=0.0
    )


def test_many_positions(device: torch.device) -> None:
    """As many as the largest step has."""
    positions, frequencies = torch.arange(8193, device=device), frequencies_of(2).to(device)
    found = kernels.rotary_rows(positions, frequencies, 1.0)
    check(found, exact(positions, frequencies, 1.0))


@pytest.mark.parametrize(
    ("dtype", "is_served"),
    [(torch.float32, True), (torch.float16, True), (torch.bfloat16, True), (torch.float64, False)],
)
def test_the_operation_takes_the_kernel_unless_it_computes_in_float64(
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


def test_each_frequency_turns_by_the_position_on_its_axis(device: torch.device) -> None:
    """And by the same position on all axes as without axes, to the bit."""
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
