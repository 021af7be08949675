"""Compare operations other than attention and sampling with their formulas in float64."""

import math

import pytest
import torch

from quire.ops.elementwise import (
    ClampedGate,
    add,
    gated_add,
    gelu,
    gelu_mul,
    gelu_tanh,
    gelu_tanh_mul,
    quick_gelu,
    relu,
    scale,
    scale_by_top,
    silu_mul,
    soft_cap,
)
from quire.ops.embedding import embedding, select_rows
from quire.ops.linear import linear
from quire.ops.norms import add_rms_norm, layer_norm, rms_norm
from quire.ops.rotary import rotary, rotary_rows
from quire.ops.weights.device_weights import can_pack, pack_weight

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """`wanted` is in float64; the tolerance is of `dtype`."""
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4), (5, 33), (3, 2, 8)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(*shape[1:], dtype=dtype, seed=2)

    def wanted(x: torch.Tensor) -> torch.Tensor:
        exact = x.double()
        return exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    before = x.clone()
    check(rms_norm(x, weight, 1e-5), wanted(x), dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    check(total, (x + residual).double(), dtype)
    check(normed, wanted(total), dtype)
    assert torch.equal(x, before)


def test_rms_norm_of_large_values_does_not_overflow() -> None:
    x, weight = torch.full((2, 64), 6e4, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    check(rms_norm(x, weight, 1e-6), torch.ones(2, 64).double(), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_equals_its_formula(dtype: torch.dtype) -> None:
    x, weight, bias = random(5, 16, dtype=dtype), random(16, dtype=dtype), random(16, dtype=dtype)
    exact = x.double()
    centred = exact - exact.mean(-1, keepdim=True)
    plain = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    check(layer_norm(x, None, None, 1e-5), plain, dtype)
    check(layer_norm(x, weight, None, 1e-5), plain * weight.double(), dtype)
    check(layer_norm(x, weight, bias, 1e-5), plain * weight.double() + bias.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gate_equals_its_formula(dtype: torch.dtype) -> None:
    gate_up = random(6, 26, dtype=dtype) * 2
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.minimum(torch.tensor(1.5)), up.clamp(-1.5, 1.5)
    assert (gate == 1.5).any() and (up == 1.5).any() and (up == -1.5).any()
    wanted = gate / (1 + (-1.7 * gate).exp()) * (up + 1)
    check(ClampedGate(1.7, 1.5)(gate_up), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_add_equals_its_formula(dtype: torch.dtype) -> None:
    x, y = random(6, 13, dtype=dtype), random(6, 13, dtype=dtype, seed=1)
    gate = random(6, 1, dtype=dtype, seed=2)
    check(gated_add(x, y, gate), x.double() + y.double() / (1 + (-gate.double()).exp()), dtype)


def test_tokens_are_gated_with_the_same_bits_in_any_batch() -> None:
    dtype = torch.float32
    x_TD, y_TD = (random(4096, 2, dtype=dtype, seed=seed) for seed in (1, 2))
    logits_TE = 3 * random(4096, 16, dtype=dtype)
    scaled, added = scale_by_top(x_TD, logits_TE), gated_add(x_TD, y_TD, logits_TE[:, :1])
    for token in range(len(x_TD)):
        x, y, logits = (each[token : token + 1] for each in (x_TD, y_TD, logits_TE))
        assert torch.equal(scale_by_top(x, logits)[0], scaled[token])
        assert torch.equal(gated_add(x, y, logits[:, :1])[0], added[token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 100])
def test_linear_equals_float64(tokens: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 48, dtype=dtype), random(33, 48, dtype=dtype, seed=1) * 48**-0.5
    offset = random(33, dtype=dtype) if bias else None
    wanted = x.double() @ weight.double().T
    if offset is not None:
        wanted += offset.double()
    check(linear(x, weight, offset), wanted, dtype)
    check(linear(x, pack_weight(weight), offset), wanted, dtype)
    check(linear(x.T.contiguous().T, pack_weight(weight), offset), wanted, dtype)


def test_float64_weights_are_not_packed() -> None:
    weight = random(4, 4, dtype=torch.float64)
    assert not can_pack(weight.dtype, weight.device)
    assert pack_weight(weight) is weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_equals_its_formula(dtype: torch.dtype) -> None:
    """Each pair of elements is a point that is rotated."""
    positions, heads, half = torch.tensor([0, 1, 77, 100_000]), 3, 4
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    x = random(4, heads, 2 * half, dtype=dtype)
    got = rotary(x, rotary_rows(positions, frequencies, 1.5, dtype))
    wanted = torch.empty(4, heads, 2 * half, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for e in range(half):
            angle = position * frequencies[e].item()
            a, b = x[t, :, e].double(), x[t, :, half + e].double()
            wanted[t, :, e] = 1.5 * (a * math.cos(angle) - b * math.sin(angle))
            wanted[t, :, half + e] = 1.5 * (b * math.cos(angle) + a * math.sin(angle))
    check(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_their_formulas(dtype: torch.dtype) -> None:
    x = random(7, 10, dtype=dtype) * 2
    exact = x.double()
    check(relu(x), exact.clamp(min=0), dtype)
    check(gelu(x), exact * (1 + torch.erf(exact / math.sqrt(2))) / 2, dtype)
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    check(gelu_tanh(x), exact * (1 + torch.tanh(inner)) / 2, dtype)
    check(quick_gelu(x), exact / (1 + torch.exp(-1.702 * exact)), dtype)
    gate, up = exact.chunk(2, dim=-1)
    check(silu_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)
    check(gelu_mul(x), gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    check(gelu_tanh_mul(x), gate * (1 + torch.tanh(inner)) / 2 * up, dtype)
    check(scale(x, 3.7), exact * 3.7, dtype)
    check(soft_cap(x, 0.8), 0.8 * torch.tanh(exact / 0.8), dtype)
    torch.testing.assert_close(x.double(), exact, rtol=0, atol=0)


def test_embedding_and_select_rows_return_rows() -> None:
    table = random(9, 4)
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(embedding(ids, table), table[ids])
    assert torch.equal(embedding(ids.int(), table), table[ids])
    assert torch.equal(select_rows(table, ids), table[ids])
    assert torch.equal(add(table, table), 2 * table)
