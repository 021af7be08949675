"""Products of 5 to 64 rows: accuracy, the same bits in any order of programs, and where `linear`
uses them.

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

# Rows, outputs and inputs: one tile; a partial tile; several that programs share.
SIZES = [(5, 128, 64), (16, 70, 320), (33, 300, 448), (64, 640, 128)]


@pytest.fixture(params=[1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 11))])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a number of programs: tiles are whole, or shared by two or by many."""
    if INTERPRETED:
        monkeypatch.setattr(kernels, "_num_cores", lambda device: request.param)
    elif request.param > 1:
        pytest.skip("a GPU has programs of its own")
    return int(request.param)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_stream_k_equals_a_float64_product(
    size: tuple[int, int, int], programs: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The result is rounded once. Memory around the rows and the weight is not read."""
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
    assert counters is not None and not counters.any(), "counters are not reset"


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a row's bits independent of its place in a matrix; numpy's are not."""
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)


@pytest.mark.usefixtures("exact_dots")
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_product_has_the_bits_of_two_operations(
    activation: str, programs: int, device: torch.device
) -> None:
    weight = weight_of(2 * 170, 192, torch.float16, device)
    bias = numbers(2 * 170, seed=3, dtype=torch.float16, device=device)
    x = numbers(9, 192, seed=2, dtype=torch.float16, device=device)
    wanted = getattr(gate_kernels, f"{activation}_mul")(kernels.stream_k(x, weight, bias))
    assert torch.equal(kernels.gated(x, weight, bias, activation), wanted)


@pytest.mark.usefixtures("exact_dots")
def test_wide_tiles_give_the_bits_of_narrow_ones(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = (numbers(n, 64, seed=n, dtype=torch.float16, device=device) for n in (600, 20))
    found = []
    for outputs in tiles.OUTPUTS:
        schedule = tiles.Schedule(tiles.Tile(outputs, 32), 4)
        monkeypatch.setattr(kernels, "schedule_for", lambda *given, to=schedule: to)
        found.append(kernels.stream_k(x, weight))
    assert torch.equal(*found)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU chooses the order itself")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_order_of_programs_does_not_change_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last program of a tile stores."""
    cpu, builder = torch.device("cpu"), interpreter.interpreter_builder
    monkeypatch.setattr(kernels, "_num_cores", lambda device: 7)
    weight, x = weight_of(300, 448, torch.float16, cpu), torch.ones(6, 448, dtype=torch.float16)
    x *= numbers(6, 448, seed=2, dtype=torch.float16, device=cpu)
    wanted = kernels.stream_k(x, weight)
    set_index = builder.set_grid_idx
    programs = tiles.schedule_for(6, 300, 448, 7).num_programs
    assert programs >= 6, "two or more programs per tile"
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


@pytest.mark.skipif(INTERPRETED, reason="only a GPU records graphs")
def test_replayed_product_gives_the_same_bits(device: torch.device) -> None:
    """The product runs 10,000 times."""
    weight = weight_of(4096, 4096, torch.bfloat16, device)
    x = numbers(32, 4096, seed=2, dtype=torch.bfloat16, device=device)
    wanted, graph = kernels.stream_k(x, weight), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [kernels.stream_k(x, weight) for _ in range(10)]
    for _ in range(1000):
        graph.replay()
        assert all(torch.equal(out, wanted) for out in found)


def test_programs_share_tiles_evenly() -> None:
    """The numbers of steps of two programs differ by at most one."""
    assert tiles.sharing(4, 3, 1) == tiles.Sharing(4, 0, 0, 0)
    assert tiles.sharing(4, 3, 4) == tiles.Sharing(4, 0, 0, 0)
    assert tiles.sharing(1, 12, 5) == tiles.Sharing(5, 5, 1, 5)
    assert tiles.sharing(3, 4, 2) == tiles.Sharing(4, 2, 1, 2)
    assert tiles.sharing(32, 64, 132).largest == 5


def test_schedule_depends_on_the_product() -> None:
    """There is a program per tile, an equal number for each tile, or one per multiprocessor."""
    gate = tiles.schedule_for(64, 28672, 4096, 132)
    assert gate == tiles.Schedule(tiles.Tile(256, 64), 112) and gate.tile.num_warps == 8
    down = tiles.schedule_for(33, 4096, 14336, 132)
    assert down == tiles.Schedule(tiles.Tile(128, 64), 128)
    assert tiles.schedule_for(16, 128256, 4096, 132).num_programs == 132
    assert tiles.schedule_for(5, 128, 64, 132) == tiles.Schedule(tiles.Tile(128, 16), 1)


# ---- where it is used ------------------------------------------------------------------------


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_is_on", lambda: True)
    monkeypatch.setattr(tiles, "MIN_NUMBERS", 64)
    if INTERPRETED:
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)


@pytest.mark.parametrize(
    ("num_rows", "outputs", "inputs", "is_used"),
    [
        (5, 9, 64, True),
        (64, 64, 64, True),
        (4, 64, 64, False),  # few rows
        (65, 65, 64, False),
        (5, 9, 96, False),  # no whole steps
        (64, 63, 64, False),  # a small weight for so many rows
    ],
)
def test_linear_uses_stream_k_for_suitable_sizes(
    num_rows: int,
    outputs: int,
    inputs: int,
    is_used: bool,
    switched_on: None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product, calls = kernels.stream_k, list[int]()
    monkeypatch.setattr(kernels, "stream_k", lambda x, *a: calls.append(len(x)) or product(x, *a))
    weight = weight_of(outputs, inputs, torch.float16, device)
    x = numbers(num_rows, inputs, seed=2, dtype=torch.float16, device=device)
    got = linear(x, weight)
    assert calls == [num_rows] * is_used
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight), atol=4e-3, rtol=4e-3)
    assert gates(x, weight) == is_used
    for other in (weight.float(), weight.T.contiguous().T, FixedOrderWeight(weight)):
        assert not gates(x.to(other.dtype), other)
    monkeypatch.setattr(kernels, "_is_on", lambda: False)
    assert not gates(x, weight), "it is off by default"


def test_no_counters_are_created_during_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be set to zero only in a replay. Existing counters are used."""
    counters = kernels._Counters(torch.device("cpu"))
    cuda: Any = type("Device", (), {"type": "cuda"})()
    counters._device = cuda
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert counters.get() is None
    counters._made = torch.zeros(1)
    assert counters.get() is not None


def test_gate_on_a_cpu_is_a_separate_operation() -> None:
    x, weight = torch.randn(6, 64), torch.randn(10, 64)
    wanted = silu_mul(linear(x, weight))
    assert torch.equal(linear_gate(x, weight, None, silu_mul), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("is_on", "launches"), [(True, 8), (False, 9)])
def test_stream_k_saves_the_launch_of_the_gate(
    is_on: bool,
    launches: int,
    as_on_gpu: None,  # noqa: F811
    switched_on: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
