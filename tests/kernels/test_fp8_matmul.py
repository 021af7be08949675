"""Products of e4m3 activations and weights for many tokens: only the activations are rounded."""

import pytest
import torch

from quire.ops import gpu
from quire.ops.kernels import fp8_matmul
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.weights import gpu_weights
from quire.ops.weights.gpu_weights import FEW_ROWS, multiply, pack_for_gpu, rounds_activations
from quire.ops.weights.stored_rows import Float8Rows
from tests.kernels.test_fp8_kv import right_rounding  # noqa: F401 (a fixture)

OUTPUTS = 140


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_gpu", lambda device: True)
        monkeypatch.setattr(gpu_weights, "multiplies_float8", lambda device: True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(inputs: int, group: int) -> Float8Rows:
    count = -(-inputs // group)
    values = random(OUTPUTS, inputs).to(torch.float8_e4m3fn)
    return Float8Rows(values, random(OUTPUTS, count, seed=1) * inputs**-0.5, group)


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Return rows rounded to e4m3; each `group` of inputs is scaled to 448."""
    inputs = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -inputs % group)).unflatten(1, (-1, group))
    largest = padded.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 448.0, 1.0)
    values = (padded / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return values.flatten(1)[:, :inputs]


@pytest.mark.parametrize(
    ("inputs", "group"),
    [
        (300, 300),
        (300, 128),
        pytest.param(2200, 2200, marks=pytest.mark.slow),
        pytest.param(2200, 128, marks=pytest.mark.slow),
    ],
)
def test_product_equals_that_of_rounded_activations(
    inputs: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """There are more tokens than in a tile, a row of zeros, and x is a slice of wider rows."""
    rows = stored(inputs, group)
    wide = random(135, inputs + 9, seed=2).to(dtype)
    wide[3] = 0.0
    wide[4] *= 100.0
    x, bias = wide[:, 5 : 5 + inputs], random(OUTPUTS, seed=3).to(dtype)
    weight = rows.dequantised(torch.float64)
    wanted = torch.nn.functional.linear(rounded(x, group), weight, bias.double())
    packed = pack_for_gpu(rows, device)
    got = fp8_matmul.matmul(wide.to(device)[:, 5 : 5 + inputs], packed, bias.to(device))
    assert got.dtype == dtype
    near = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    # Hopper's e4m3 instruction truncates each addend at 13 bits below the largest.
    cut_off = 0.0 if INTERPRETED else 2.0**-11 * (rounded(x, group).abs() @ weight.abs().T)
    apart = (got.double().cpu() - wanted).abs()
    assert bool((apart <= near + near * wanted.abs() + cut_off).all()), apart.max()
    exact = torch.nn.functional.linear(x.double(), weight, bias.double())
    error = (got.double().cpu() - exact).norm() / exact.norm()
    assert 0.005 < error < 0.05, error


def test_only_activations_of_many_rows_are_rounded(device: torch.device) -> None:
    """With a fixed order of sums none are: a row must not depend on the number of rows."""
    weight = pack_for_gpu(stored(256, 128), device)
    many = torch.zeros(FEW_ROWS + 1, 256, dtype=torch.bfloat16, device=device)
    assert rounds_activations(many, weight)
    assert not rounds_activations(many[1:], weight)
    assert not rounds_activations(many, weight.fixed())
    assert not rounds_activations(many.float(), weight)
    assert not rounds_activations(many, pack_for_gpu(stored(256, 64), device))


def test_multiply_uses_fp8_matmul_for_many_rows(device: torch.device) -> None:
    rows = stored(256, 256)
    x = random(FEW_ROWS + 2, 256, seed=2).half().to(device)
    weight = pack_for_gpu(rows, device)
    got = multiply(x, weight)
    assert torch.equal(got, fp8_matmul.matmul(x, weight))
    few = multiply(x[:5], weight).double().cpu()
    exact = x[:5].double().cpu() @ rows.dequantised(torch.float64).T
    torch.testing.assert_close(few, exact, atol=2e-3, rtol=2e-3)
