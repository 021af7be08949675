"""Compare mixtures of experts with sums written out token by token."""

import pytest
import torch

from quire.ops.elementwise import ClampedGate
from quire.ops.host.native import core
from quire.ops.moe import moe_experts, moe_route
from quire.ops.registry import record_ops
from quire.ops.weights.device_weights import pack_weight

E, C, D, F = 6, 3, 20, 12


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def experts(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gate and up joined, and down."""
    gate_up = numbers(E, 2 * F, D, seed=3) * D**-0.5
    return gate_up.to(dtype), (numbers(E, D, F, seed=4) * F**-0.5).to(dtype)


def by_hand(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    gate_up, down = experts()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = gate_up[expert, :F] @ x[token], gate_up[expert, F:] @ x[token]
            out[token] += weight * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("normalises", [True, False])
def test_route_chooses_the_largest_logits(normalises: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, -1.0, 5.0, 5.0]])
    ids, weights = moe_route(logits, 2, normalises)
    assert ids.tolist() == [[1, 3], [0, 2]], "ties go to the lowest id"
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    wanted = logits.softmax(-1).gather(1, ids.long())
    if normalises:
        wanted = torch.full_like(wanted, 0.5)
    torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_routing_weights_have_at_least_float32_precision(
    dtype: torch.dtype, precision: torch.dtype
) -> None:
    logits = numbers(5, E, seed=1, dtype=dtype)
    _, weights = moe_route(logits, C, True)
    assert weights.dtype == precision
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, dtype=precision))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17])
def test_experts_equal_written_out_sums(num_tokens: int) -> None:
    x = numbers(num_tokens, D, seed=1)
    ids, weights = moe_route(numbers(num_tokens, E, seed=2), C, True)
    wanted = by_hand(x, ids, weights)
    gate_up, down = experts()
    with record_ops() as record:
        got = moe_experts(x, ids, weights, gate_up, down)
    assert record.names == ["moe_experts"]
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moe_experts(x, ids, weights, [*gate_up], [*down]), got)


@pytest.mark.parametrize("num_tokens", [1, 17])
def test_experts_with_biases_and_clamped_gate_equal_written_out_sums(num_tokens: int) -> None:
    x = numbers(num_tokens, D, seed=1)
    ids, weights = moe_route(numbers(num_tokens, E, seed=2), C, True)
    gate_up, down = experts()
    biases = numbers(E, 2 * F, seed=5), numbers(E, D, seed=6)
    wanted = torch.zeros_like(x)
    for token, expert, weight in zip(
        torch.arange(num_tokens).repeat_interleave(C), ids.flatten(), weights.flatten(), strict=True
    ):
        both = gate_up[expert] @ x[token] + biases[0][expert]
        gate, up = both[:F].clamp(max=0.7), both[F:].clamp(-0.7, 0.7)
        inner = gate * (1.3 * gate).sigmoid() * (up + 1)
        wanted[token] += weight * (down[expert] @ inner + biases[1][expert])
    clamped = ClampedGate(1.3, 0.7)
    got = moe_experts(x, ids, weights, gate_up, down, biases, clamped)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    lists = [*biases[0]], [*biases[1]]
    assert torch.equal(moe_experts(x, ids, weights, [*gate_up], [*down], lists, clamped), got)


def test_weights_of_unused_experts_are_not_read() -> None:
    x = numbers(4, D, seed=1)
    ids, weights = torch.tensor([[4, 1, 2]] * 4, dtype=torch.int32), torch.ones(4, C).double() / C
    gate_up, down = experts()
    wanted = moe_experts(x, ids, weights, gate_up, down)
    for unused in (0, 3, 5):
        gate_up[unused], down[unused] = torch.nan, torch.nan
    assert torch.equal(moe_experts(x, ids, weights, gate_up, down), wanted)


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x = numbers(19, D, seed=1, dtype=dtype)
    logits = numbers(19, E, seed=2, dtype=dtype)
    gate_up, down = ([pack_weight(each) for each in weights] for weights in experts(dtype))

    def run(rows: slice) -> torch.Tensor:
        return moe_experts(x[rows], *moe_route(logits[rows], C, True), gate_up, down)

    whole = run(slice(None))
    assert whole.dtype == dtype
    assert torch.equal(torch.cat([run(slice(i, i + 1)) for i in range(19)]), whole)
    assert torch.equal(torch.cat([run(slice(0, 5)), run(slice(5, None))]), whole)


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_results_of_parts_of_the_experts_add_up(num_tokens: int) -> None:
    x = numbers(num_tokens, D, seed=1)
    ids, weights = moe_route(numbers(num_tokens, E, seed=2), C, True)
    gate_up, down = experts()
    total = torch.zeros_like(x)
    for first, end in ((0, 2), (2, 5), (5, 6)):
        own = gate_up[first:end], down[first:end]
        total += moe_experts(x, ids, weights, *own, first=first)
    torch.testing.assert_close(total, by_hand(x, ids, weights), rtol=1e-12, atol=1e-12)
