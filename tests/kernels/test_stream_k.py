"""Products of 5 to 64 rows: near float64, the same bits in any order of programs, and taken where
they serve.

Covers `ops/kernels/products/tiles.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

from quire.ops import gpu
from quire.ops.elementwise import silu_mul
from quire.ops.fused_linear import gates, linear_gate
from quire.ops.kernels import gate as gate_kernels
from quire.ops.kernels.launch import INTERPRETED
from quire.ops.kernels.products import stream_k as kernels
from quire.ops.kernels.products import tiles
from quire.ops.linear import linear
from quire.ops.precision import FixedOrderWeight
from tests.kernels.test_attention_merge import nan_filled
from tests.kernels.test_deterministic import exact_dot
from tests.kernels.test_few_rows import numbers, weight_of
from tests.kernels.test_fused_linear import WIDE, close
from tests.kernels.test_step_bytes import as_on_gpu, step_of  # noqa: F401 (a fixture)

# Rows, outputs and inputs: one tile; a part of one; several that programs share.
SIZES = [(5, 128, 64), (16, 70, 320), (33, 300, 448), (64, 640, 128)]


@pytest.fixture(params=[1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 11))])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles are whole, shared by two programs, and by many."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "_num_cores", lambda device: request.param)
    elif request.param > 1:
        pytest.skip("a GPU has programs of its own")
    return int(request.param)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_a_product(
    size: tuple[int, int, int], programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rounded once, at the end. Rows and weights around it are not read."""
    rows, outputs, inputs = size
    around = weight_of(outputs + 2, inputs, dtype, device)
    around[[0, -1]] = torch.nan
    wide = numbers(rows + 2, inputs, seed=2, dtype=dtype, device=device)
    wide[[0, -1]] = torch.nan
    x, weight = wide[1:-1], around[1:-1]
    for bias in (None, numbers(outputs, seed=3, dtype=dtype, device=device)):
        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        close(kernels.stream_k(x, weight, bias), wanted, dtype, roundings=2)
    counters = kernels._counters(device).get()
    assert counters is not None and not counters.any(), "the next product counts from zero"


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose rows have the same bits in any place of a matrix. numpy's may differ."""
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)


@pytest.mark.usefixtures("exact_dots")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_after_a_product(activation: str, programs: int, device: torch.device) -> None:
    """The bits of two operations."""
    weight = weight_of(2 * 170, 192, torch.float16, device)
    bias = numbers(2 * 170, seed=3, dtype=torch.float16, device=device)
    x = numbers(9, 192, seed=2, dtype=torch.float16, device=device)
    wanted = getattr(gate_kernels, f"{activation}_mul")(kernels.stream_k(x, weight, bias))
    assert torch.equal(kernels.gated(x, weight, bias, activation), wanted)


@pytest.mark.usefixtures("exact_dots")
def test_wide_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = (numbers(n, 64, seed=n, dtype=torch.float16, device=device) for n in (600, 20))
    found = []
    for outputs in tiles.OUTPUTS:
        schedule = tiles.Schedule(tiles.Tile(outputs, 32), 4)
        monkeypatch.setattr(kernels, "schedule_for", lambda *given, to=schedule: to)
        found.append(kernels.stream_k(x, weight))
    assert torch.equal(*found)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has an order of its own")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_program_may_be_the_last(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have the same bits in each order."""
    cpu, builder = torch.device("cpu"), interpreter.interpreter_builder
    monkeypatch.setattr(kernels, "_num_cores", lambda device: 7)
    weight, x = weight_of(300, 448, torch.float16, cpu), torch.ones(6, 448, dtype=torch.float16)
    x *= numbers(6, 448, seed=2, dtype=torch.float16, device=cpu)
    wanted = kernels.stream_k(x, weight)
    set_index = builder.set_grid_idx
    programs = tiles.schedule_for(6, 300, 448, 7).num_programs
    assert programs >= 6, "two or more of each tile"
    order = np.random.default_rng(seed).permutation(programs).tolist()
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(order[x], y, z))
    monkeypatch.setattr(torch, "empty", nan_filled)
    stored, store = list[int](), kernels._store
    monkeypatch.setattr(kernels, "_store", lambda *a: stored.append(0) or store(*a))
    loaded, load = list[int](), kernels._sums_of
    monkeypatch.setattr(kernels, "_sums_of", lambda *a: loaded.append(0) or load(*a))
    assert torch.equal(kernels.stream_k(x, weight), wanted)
    assert len(stored) == 3, "once per tile"
    shared = tiles.sharing(3, 7, programs)
    assert len(loaded) == shared.partial - shared.tiles > 0, "all but the last program's own sums"
    monkeypatch.setattr(kernels, "arrives_last", lambda *given: False)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda own, *a, **k: own.new_zeros(*a, **k))
    assert torch.equal(kernels.stream_k(x, weight), torch.zeros_like(wanted)), (
        "only the last program stores"
    )


@pytest.mark.skipif(INTERPRETED, reason="only a GPU records")
def test_replays_on_a_gpu(device: torch.device) -> None:
    """A recorded product gives the same bits 10,000 times."""
    weight = weight_of(4096, 4096, torch.bfloat16, device)
    x = numbers(32, 4096, seed=2, dtype=torch.bfloat16, device=device)
    wanted, graph = kernels.stream_k(x, weight), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [kernels.stream_k(x, weight) for _ in range(10)]
    for _ in range(1000):
        graph.replay()
        assert all(torch.equal(out, wanted) for out in found)


def test_programs_share_tiles_evenly() -> None:
    """Each program has as many steps as any other, or one more."""
    assert tiles.sharing(4, 3, 1) == tiles.Sharing(4, 0, 0, 0)
    assert tiles.sharing(4, 3, 4) == tiles.Sharing(4, 0, 0, 0)
    assert tiles.sharing(1, 12, 5) == tiles.Sharing(5, 5, 1, 5)
    assert tiles.sharing(3, 4, 2) == tiles.Sharing(4, 2, 1, 2)
    assert tiles.sharing(32, 64, 132).largest == 5


def test_schedules() -> None:
    """A tile for each program, equal parts of each tile, or all multiprocessors."""
    gate = tiles.schedule_for(64, 28672, 4096, 132)
    assert gate == tiles.Schedule(tiles.Tile(256, 64), 112) and gate.tile.num_warps == 8
    down = tiles.schedule_for(33, 4096, 14336, 132)
    assert down == tiles.Schedule(tiles.Tile(128, 64), 128)
    assert tiles.schedule_for(16, 128256, 4096, 132).num_programs == 132
    assert tiles.schedule_for(5, 128, 64, 132) == tiles.Schedule(tiles.Tile(128, 16), 1)


# ---- where it is taken -----------------------------------------------------------------------


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_is_on", lambda: True)
    monkeypatch.setattr(tiles, "MIN_NUMBERS", 64)
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "is_taken"),
    [
        (5, 9, 64, True),
        (64, 64, 64, True),
        (4, 64, 64, False),  # few rows
        (65, 65, 64, False),
        (5, 9, 96, False),  # no whole steps
        (64, 63, 64, False),  # a small weight for so many rows
    ],
)
def test_linear_takes_it(
    num_rows: int,
    outputs: int,
    inputs: int,
    is_taken: bool,
    switched_on: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, taken = kernels.stream_k, list[int]()
    monkeypatch.setattr(kernels, "stream_k", lambda x, *a: taken.append(len(x)) or product(x, *a))
    weight = weight_of(outputs, inputs, torch.float16, device)
    x = numbers(num_rows, inputs, seed=2, dtype=torch.float16, device=device)
    got = linear(x, weight)
    assert taken == [num_rows] * is_taken
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight), atol=4e-3, rtol=4e-3)
    assert gates(x, weight) == is_taken
    for other in (weight.float(), weight.T.contiguous().T, FixedOrderWeight(weight)):
        assert not gates(x.to(other.dtype), other)
    monkeypatch.setattr(kernels, "_is_on", lambda: False)
    assert not gates(x, weight), "off unless it is switched on"


def test_no_counters_are_made_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their zeros would come with a replay. Existing ones serve."""
    counters = kernels._Counters(torch.device("cpu"))
    cuda: Any = type("Device", (), {"type": "cuda"})()
    counters._device = cuda
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert counters.get() is None
    counters._made = torch.zeros(1)
    assert counters.get() is not None


def test_elsewhere_a_gate_is_a_separate_operation() -> None:
    x, weight = torch.randn(6, 64), torch.randn(10, 64)
    wanted = silu_mul(linear(x, weight))
    assert torch.equal(linear_gate(x, weight, None, silu_mul), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("is_on", "launches"), [(True, 8), (False, 9)])
def test_launches_of_a_layer(
    is_on: bool,
    launches: int,
    as_on_gpu: None,  # noqa: F811
    switched_on: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate takes none of its own."""
    if not INTERPRETED:
        pytest.skip("it looks into Triton's interpreter")
    monkeypatch.setattr(kernels, "_is_on", lambda: is_on)
    short, long = (
        [name for name, _ in step_of(n, tmp_path / str(n), monkeypatch, 5, WIDE).launches]
        for n in (1, 2)
    )
    assert len(long) - len(short) == launches, long
    more = long.count("_stream_k_kernel") - short.count("_stream_k_kernel")
    assert more == (4 if is_on else 0)
