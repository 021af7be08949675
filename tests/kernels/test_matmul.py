"""Products with a fixed order of sums: accuracy, and the same bits for a row in any batch."""

import pytest
import torch

from quire.base.errors import ConfigError
from quire.models.load.packing import model_bytes
from quire.models.parts.determinism import make_deterministic
from quire.models.parts.layers import Embedding, Linear, LMHead, ParamFactory
from quire.ops import gpu
from quire.ops.kernels import matmul as kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.linear import linear
from quire.ops.precision import FixedOrderWeight
from tests.kernels.test_deterministic import exact_dots  # noqa: F401 (a fixture)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SIZES = [(96, 32), (40, 130), (130, 33), (1, 64)]  # outputs, inputs


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 64, 70])
def test_matmul_equals_a_float64_product(
    num_tokens: int, size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    outputs, inputs = size
    weight = numbers(outputs, inputs, seed=1, dtype=dtype, device=device) * inputs**-0.5
    x = numbers(num_tokens, inputs, seed=2, dtype=dtype, device=device)
    bias = numbers(outputs, seed=3, dtype=dtype, device=device)
    for b in (None, bias):
        wanted = torch.nn.functional.linear(
            x.double(), weight.double(), b if b is None else b.double()
        )
        got = kernels.matmul(x, weight, b)
        assert got.dtype == dtype and got.shape == (num_tokens, outputs)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tile", [kernels.WIDE, kernels.NARROW], ids=str)
def test_matmul_takes_many_rows_and_outputs(
    tile: kernels.Tile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more row tiles than a group has, and the last group is not full."""
    monkeypatch.setattr(kernels, "TILE_OF_FLOAT32", tile)
    if not INTERPRETED:
        pytest.skip("float32 has a tile of its own")
    x = numbers(9 * 64 + 5, 48, seed=1, dtype=torch.float32, device=device)
    weight = numbers(2 * 128 + 3, 48, seed=2, dtype=torch.float32, device=device)
    torch.testing.assert_close(kernels.matmul(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_memory_around_the_rows_is_not_read(device: torch.device) -> None:
    """The rows are a slice of a wider tensor, which is NaN elsewhere."""
    wide = numbers(6, 50, seed=1, dtype=torch.float32, device=device)
    x = wide[1:4, 7:40]
    weight = numbers(20, 33, seed=2, dtype=torch.float32, device=device)
    wanted = kernels.matmul(x.clone(), weight)
    saved = wide.clone()
    wide.fill_(torch.nan)
    wide[1:4, 7:40] = saved[1:4, 7:40]
    assert torch.equal(kernels.matmul(x, weight), wanted)


def test_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    """It runs alone, and at several positions of up to 130 rows."""
    weight = numbers(70, 40, seed=1, dtype=dtype, device=device)
    bias = numbers(70, seed=2, dtype=dtype, device=device)
    x = numbers(130, 40, seed=3, dtype=dtype, device=device)
    whole = kernels.matmul(x, weight, bias)
    for first, last in [(0, 1), (64, 65), (129, 130), (0, 2), (5, 68), (63, 127), (66, 130)]:
        got = kernels.matmul(x[first:last], weight, bias)
        assert torch.equal(got, whole[first:last]), (first, last)


def test_tile_depends_only_on_the_weight() -> None:
    """Few outputs have narrow tiles."""
    assert kernels.tile_for(4096, torch.bfloat16).outputs == 64
    assert kernels.tile_for(28672, torch.bfloat16).outputs == 128
    assert {kernels.tile_for(n, torch.float16).rows for n in (1, 4096, 150_000)} == {64}


# ---- weights with a fixed order --------------------------------------------------------------


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> ParamFactory:
    """Return a factory; operations use the kernels."""
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    return ParamFactory(torch.float32, device)


def tied_model(factory: ParamFactory) -> torch.nn.Module:
    model = torch.nn.Module()
    model.embedding = Embedding("table", 40, 16, factory)
    model.layer = Linear(["a"], 16, [16], factory, bias=True)
    model.head = LMHead("head", 40, 16, factory, model.embedding)
    for i, parameter in enumerate(model.parameters()):
        parameter.copy_(
            numbers(*parameter.shape, seed=i, dtype=factory.dtype, device=factory.device)
        )
    return model


def test_make_deterministic_keeps_memory_and_tied_weights(
    factory: ParamFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call changes nothing more."""
    model = tied_model(factory)
    x = numbers(5, 16, seed=9, dtype=factory.dtype, device=factory.device)
    before, num_bytes = [model.layer(x), model.head(x)], model_bytes(model)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
    for _ in range(2):
        make_deterministic(model)
        assert isinstance(model.layer.weight, FixedOrderWeight)
        assert model.head.weight is model.embedding.weight
        assert model_bytes(model) == num_bytes
        after = {name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)}
        assert after == addresses
        ids = torch.tensor([3, 39], device=factory.device)
        assert torch.equal(model.embedding(ids), model.head.weight[ids])
    called = []
    monkeypatch.setattr(kernels, "matmul", lambda *a: called.append(a) or a[0] @ a[1].T)
    linear(x, model.layer.weight, model.layer.bias)
    assert len(called) == 1
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    for got, wanted in zip([model.layer(x), model.head(x)], before, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_make_deterministic_rejects_float64_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays unchanged."""
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    model = tied_model(ParamFactory(torch.float32, torch.device("cpu")))
    model.layer.weight.data = model.layer.weight.data.double()
    with pytest.raises(
        ConfigError, match="deterministic needs a GPU.*layer.weight is torch.float64"
    ):
        make_deterministic(model)
    weights = list(model.parameters())
    assert not any(isinstance(weight, FixedOrderWeight) for weight in weights)
