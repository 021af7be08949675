"""Compare the convolution and the delta rule of layers with states with loops in float64.

Covers `ops/kernels/attention/delta_rule.py`.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.ops.attention.base import KVLayout
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import AttentionStep, DeltaHeads
from quire.ops.kernels.attention.delta_chunks import Chunks
from quire.ops.kernels.launch import INTERPRETED
from tests.kernels.test_attention import on
from tests.ops.test_states import (
    HEADS,
    WIDTH,
    Inputs,
    P,
    at_once,
    layout_of,
    run,
    run_drafting,
    step_of,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LONG = 11 * P  # tokens of a row in a step: several chunks, which do not end with blocks
SMALL, USUAL = Chunks(tokens=16, tile=16, few=2), Chunks(tile=16, few=0)
LARGE = Chunks(tokens=64, tile=16, few=0)


class Kernels:
    """TritonBackend that takes tensors of the host and makes each a slice of a wider one.

    States that were not written are NaN.
    """

    def __init__(self, layout: KVLayout, device: torch.device, **settings: Any) -> None:
        self.inner = TritonBackend(replace(layout, device=device), **settings)
        self.device = device
        for kv in self.inner._memory.kv:
            kv.fill_(torch.nan)

    def prepare(self, step: AttentionStep) -> None:
        self.inner.prepare(on(self.device, step))

    def prepare_states(self, step: AttentionStep) -> None:
        self.inner.prepare_states(on(self.device, step))

    def convolve(self, layer: int, x_TC: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
        return self.inner.convolve(layer, self.part(x_TC), weight_CW.to(self.device)).cpu()

    def delta_rule(
        self,
        layer: int,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        rate_N: torch.Tensor,
        shift_N: torch.Tensor,
        heads: DeltaHeads,
    ) -> torch.Tensor:
        given = self.part(qkv_TC), self.part(gates_TG)
        rates = rate_N.to(self.device), shift_N.to(self.device)
        return self.inner.delta_rule(layer, *given, *rates, heads).cpu()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((len(x), x.shape[1] + 5), torch.nan, dtype=x.dtype)
        wide[:, 3 : 3 + x.shape[1]] = x
        return wide.to(self.device)[:, 3 : 3 + x.shape[1]]


def check_sequences(
    dtype: torch.dtype, device: torch.device, seed: int, max_tokens: int = LONG, **settings: Any
) -> None:
    inputs = [
        Inputs(seed * 10 + i, max_tokens + 3 + max_tokens // 3 * i, HEADS, dtype) for i in range(3)
    ]
    backend = Kernels(layout_of(dtype), device, **settings)
    made = run(backend, inputs, seed % 2, seed, max_tokens)
    for each, (convolved, out) in zip(inputs, made, strict=True):
        assert convolved.dtype == out.dtype == dtype
        atol = TOLERANCE[dtype]
        torch.testing.assert_close(convolved.double(), each.convolved()[0], rtol=0, atol=atol)
        torch.testing.assert_close(out.double(), each.remembered()[0], rtol=0, atol=atol / 4)


@pytest.mark.parametrize("max_tokens", [2 * P, pytest.param(LONG, marks=pytest.mark.slow)])
def test_sequences_in_steps_of_any_length_equal_float64(
    dtype: torch.dtype, device: torch.device, max_tokens: int
) -> None:
    """float32 runs token by token, 16 bits in chunks; with snapshots, rewinds, skipped blocks."""
    check_sequences(dtype, device, seed=1, max_tokens=max_tokens, chunks=SMALL)


@pytest.mark.parametrize(
    ("dtype", "max_tokens"),
    [(torch.float32, 2 * P), pytest.param(torch.float16, LONG, marks=pytest.mark.slow)],
)
def test_rejected_drafts_leave_no_states(
    dtype: torch.dtype, max_tokens: int, device: torch.device
) -> None:
    inputs = [Inputs(20 + i, 30 + 7 * i, HEADS, dtype) for i in range(3)]
    alone = [at_once(ReferenceBackend(layout_of(dtype)), each, is_layer=True) for each in inputs]
    backend = Kernels(layout_of(dtype), device, chunks=SMALL)
    for one, made in zip(alone, run_drafting(backend, inputs, 3, max_tokens), strict=True):
        for wanted, found in zip(one, made, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunks", [USUAL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_sequences_in_longer_chunks_equal_float64(chunks: Chunks, device: torch.device) -> None:
    check_sequences(torch.float16, device, seed=2, chunks=chunks)


@pytest.fixture
def reversed_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the programs of each launch in reverse order."""
    if not INTERPRETED:
        pytest.skip("a GPU chooses the order itself")
    from triton.runtime.interpreter import InterpreterBuilder

    def reversed_index(self: Any, *places: int) -> None:
        counts = zip(self.grid_dim, places, strict=True)
        self.grid_idx = tuple(count - 1 - place for count, place in counts)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", reversed_index)


def test_programs_may_run_in_reverse_order(reversed_programs: None, device: torch.device) -> None:
    check_sequences(torch.float16, device, seed=4, max_tokens=4 * P, chunks=SMALL)
    check_sequences(torch.float32, device, seed=5, max_tokens=2 * P)


def test_convolution_updates_a_long_block_in_place(
    reversed_programs: None, device: torch.device
) -> None:
    """The block is longer than a program's tokens. Programs run in reverse order."""
    layout = replace(layout_of(torch.float32), block_size=64)
    backend, inputs = Kernels(layout, device), Inputs(1, 80, HEADS, torch.float32)
    found, done = [], 0
    for count in (10, 53, 17):
        backend.prepare(step_of([(done, count, [4, 7])]))
        found.append(backend.convolve(0, inputs.x[done : done + count], inputs.weight))
        done += count
    wanted = inputs.convolved()[0]
    torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_deterministic_mode_gives_the_same_bits_in_any_chunks_and_batch(
    dtype: torch.dtype, device: torch.device
) -> None:
    found = []
    for seed, count, max_tokens in ((0, 3, LONG), (1, 1, LONG), (2, 2, 3 * P)):
        inputs = [Inputs(i, 30, HEADS, dtype) for i in range(count)]
        backend = Kernels(layout_of(dtype), device, deterministic=True)
        found.append(run(backend, inputs, 0, seed, max_tokens)[0])
    for convolved, out in found[1:]:
        assert torch.equal(convolved, found[0][0]) and torch.equal(out, found[0][1])


@pytest.mark.parametrize("keys", ["drawn", "equal"])
def test_states_have_the_precision_of_float32(keys: str, device: torch.device) -> None:
    """Also where all keys are equal and nothing is forgotten: the powers of such a chunk's
    triangular system exceed float32."""
    heads = DeltaHeads(1, 2, 16, 32)
    length = 70
    inputs = Inputs(3, length, heads, torch.float16)
    if keys == "equal":
        inputs.x[:, :32] = inputs.x[0, :32]
        inputs.gates[:, :2], inputs.gates[:, 2:] = 9.0, -20.0
    layout = replace(layout_of(torch.float16, heads), block_size=32)
    step = step_of([(0, length, [5, -1, 3])])
    given = (inputs.x, inputs.gates, inputs.rate, inputs.shift, heads)
    exact = ReferenceBackend(layout)
    exact.prepare(step)
    exact.delta_rule(1, *given)
    for chunks in (Chunks(few=0), Chunks(tokens=16, few=0)):
        backend = Kernels(layout, device, chunks=chunks)
        backend.prepare(step)
        backend.delta_rule(1, *given)
        found = backend.inner._memory.kv[0][0, 1, 0, :, 0, -heads.memory_size :].cpu()
        for block in (5, 3):
            wanted = exact.states(1)[block, -heads.memory_size :]
            assert wanted.abs().max() > 0.5
            torch.testing.assert_close(found[block], wanted, rtol=0, atol=2e-6)
        assert found[[0, 1, 2, 4]].isnan().all()


def test_padding_changes_no_states(dtype: torch.dtype, device: torch.device) -> None:
    """A recorded step has tokens without a row, and rows without tokens."""
    rows = [(7, 0, [9, 8]), (6, 5, [1, 2, 3]), (0, 0, [-1]), (3, 1, [4, -1]), (0, 0, [-1])]
    inputs = Inputs(1, 17, HEADS, dtype)
    for extra in (0, 11):  # rows as many as tokens, or fewer
        step = step_of(rows)
        total = int(step.query_starts_S1[-1]) + extra
        backend = Kernels(layout_of(dtype), device, chunks=SMALL)
        memory = backend.inner._memory.kv[0]
        memory.fill_(0.25)
        before = memory.clone()
        backend.prepare(step)
        x, gates = inputs.x[:total], inputs.gates[:total]
        convolved = backend.convolve(0, x, inputs.weight)
        out = backend.delta_rule(0, x, gates, inputs.rate, inputs.shift, HEADS)
        assert convolved[:6].isfinite().all() and out[:6].isfinite().all()
        changed = (memory != before).flatten(4).any(-1).nonzero()[:, [1, 3]].tolist()
        assert changed == [[0, 2], [0, 3], [0, 4]]


def test_short_and_long_rows_share_a_step(device: torch.device) -> None:
    """Each row is computed once, whichever kernel takes it."""
    lens = [1, 2, 3, 17, 0, 40]
    total = sum(lens)
    inputs = Inputs(6, total, HEADS, torch.float16)
    found = []
    for chunks in (SMALL, replace(SMALL, few=0), replace(SMALL, few=total)):
        backend = Kernels(layout_of(torch.float16), device, chunks=chunks)
        tables = [[12 * r + i for i in range(-(-count // P))] for r, count in enumerate(lens)]
        order = list(range(len(lens)))
        random.Random(1).shuffle(order)
        backend.prepare(step_of([(0, lens[r], tables[r] or [-1]) for r in order]))
        out = backend.delta_rule(0, inputs.x, inputs.gates, inputs.rate, inputs.shift, inputs.heads)
        found.append((out, backend.inner._memory.kv[0].cpu()))
    for out, memory in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=0, atol=1e-3)
        torch.testing.assert_close(memory, found[0][1], rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", [2, 4, 7])
def test_convolution_takes_any_width(width: int, device: torch.device) -> None:
    """One width exceeds a tile of few tokens. Steps have one token, or several."""
    channels, length = 37, 12
    draw = torch.Generator().manual_seed(width)
    x = torch.randn(length, channels, generator=draw)
    weight = torch.randn(channels, width, generator=draw)
    layout = layout_of(torch.float32)
    found = []
    for lens in ([12], [1, 1, 1, 2, 7]):
        backend = Kernels(layout, device)
        done, parts = 0, []
        for count in lens:
            backend.prepare(step_of([(done, count, [4, 2, 3])]))
            parts.append(backend.convolve(1, x[done : done + count], weight))
            done += count
        found.append(torch.cat(parts))
    assert torch.equal(*found)
    padded = torch.cat([torch.zeros(width - 1, channels), x])
    made = sum(weight[:, w] * padded[w : w + length] for w in range(width))
    torch.testing.assert_close(found[0], torch.nn.functional.silu(made), rtol=0, atol=3e-6)


def test_step_without_tokens_changes_nothing(device: torch.device) -> None:
    backend = Kernels(layout_of(torch.float16), device)
    inputs = Inputs(0, 0, HEADS, torch.float16)
    backend.prepare(step_of([(5, 0, [1, 2])]))
    assert backend.convolve(0, inputs.x, inputs.weight).shape == (0, HEADS.channels)
    out = backend.delta_rule(0, inputs.x, inputs.gates, inputs.rate, inputs.shift, HEADS)
    assert out.shape == (0, HEADS.values, HEADS.value_dim)
    assert WIDTH == 4 and backend.inner._memory.kv[0].isnan().all()
