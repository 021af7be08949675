"""Compare all attention backends with a plain softmax over contiguous memory.

Covers `ops/attention/batches.py` and `ops/attention/torch_cpu.py`.
"""

import inspect
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, ForwardingBackend
from quire.ops.attention.select import BACKENDS, make_backend
from quire.ops.attention.within_step import make_within_step
from quire.ops.attention_inputs import Scores
from quire.ops.host.native import core
from quire.spec.cache_group import CacheGroup
from tests.support.cases import in_turn
from tests.support.kernels.attention_cases import (
    HEAD_DIM,
    NUM_VALUES,
    Case,
    Contents,
    attend_contiguous,
    make_contents,
    run_backend,
    run_named,
    run_step,
    softmax_of,
    steps_of,
)
from tests.support.models.paged_forward import RowPart, make_step

DECODE = [(17, 1), (1, 1), (40, 1), (16, 1)]
MIXED = [(0, 9), (30, 1), (5, 7), (0, 1), (31, 1), (3, 90)]
CASES = {
    "decode": Case(DECODE),
    "prefill": Case([(0, 13), (0, 70), (0, 1)]),
    "mixed": Case(MIXED),
    "block_1": Case([(0, 4), (12, 1), (5, 7), (0, 1), (13, 1)], block_size=1),
    "block_3": Case(MIXED, block_size=3),
    "block_16": Case(MIXED, block_size=16),
    "block_256": Case(MIXED, block_size=256),
    "multi_query": Case(MIXED, heads=6, kv_heads=1),
    "multi_head": Case(MIXED, heads=3, kv_heads=3),
    "window_1": Case(MIXED, window=1),
    "window_5": Case(MIXED, window=5),
    "window_64": Case([*MIXED, (300, 70)], window=64),
    "window_larger": Case(MIXED, window=1000),
    "chunk_1": Case(MIXED, chunk=1),
    "chunk_5": Case(MIXED, chunk=5),
    "chunk_13": Case([(11, 1), (12, 1), (13, 1), (25, 3), (20, 50)], block_size=3, chunk=13),
    "chunk_64": Case([*MIXED, (300, 150), (63, 1), (64, 1), (63, 9)], chunk=64),
    "chunk_290": Case([(600, 1), (255, 80), (579, 2), (580, 3)], block_size=16, chunk=290),
    "chunk_larger": Case(MIXED, chunk=1000),
    "very_uneven": Case([(3, 1), (900, 1), (4, 1), (5, 1), (700, 1)], block_size=16),
    "several_new": Case([(20, 3), (25, 3), (7, 3), (9, 2)], block_size=3),
    "long": Case([(600, 1), (255, 1), (256, 1), (511, 8), (300, 2)], block_size=16),
    "long_window": Case([(600, 1), (255, 8), (511, 3)], block_size=16, window=290),
    "one": Case([(0, 1)]),
    "cap_sinks_chunk": Case(MIXED, block_size=3, chunk=7, soft_cap=2.0, has_sinks=True),
    "cap": Case(MIXED, soft_cap=0.7),
    "cap_30": Case(MIXED, soft_cap=30.0, heads=3, kv_heads=3),
    "sinks": Case(MIXED, has_sinks=True),
    "sinks_decode": Case(DECODE, has_sinks=True, heads=6, kv_heads=1),
    "cap_sinks": Case(MIXED, block_size=16, soft_cap=2.0, has_sinks=True, heads=6, kv_heads=3),
    "cap_sinks_window": Case(MIXED, block_size=3, window=5, soft_cap=2.0, has_sinks=True),
    "cap_sinks_long": Case(
        [(600, 1), (255, 8), (511, 3), (3, 90)], block_size=16, soft_cap=1.0, has_sinks=True
    ),
    "cap_sinks_long_window": Case(
        [(600, 1), (255, 8), (511, 3)], 16, window=290, soft_cap=1.0, has_sinks=True
    ),
}
LATENT_CASES = {
    "decode": Case(DECODE, kv_heads=1, is_latent=True),
    "mixed": Case(MIXED, kv_heads=1, is_latent=True),
    "block_1": Case(CASES["block_1"].rows, block_size=1, kv_heads=1, is_latent=True),
    "block_3": Case(MIXED, block_size=3, heads=6, kv_heads=1, is_latent=True),
    "block_16": Case(MIXED, block_size=16, heads=1, kv_heads=1, is_latent=True),
    "several_new": Case(CASES["several_new"].rows, 3, kv_heads=1, is_latent=True),
    "long": Case(CASES["long"].rows, block_size=16, heads=16, kv_heads=1, is_latent=True),
}
HAVE_LATENTS = ("reference", "torch")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
# The dtype in which each backend is compared most closely.
EXACT = {"reference": torch.float64, "torch": torch.float64, "cpu": torch.float32}


# tests/kernels tests the kernels of `triton`.
@pytest.fixture(params=[name for name in BACKENDS if name != "triton"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and core() is None:
        pytest.skip("the C++ core was not built")
    return str(request.param)


def check(name: str, got: torch.Tensor, case: Case, contents: Contents) -> None:
    wanted = attend_contiguous(case, contents)
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[EXACT[name]])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_reference_equals_softmax(case: Case) -> None:
    got = run_named("reference", case, torch.float64)
    torch.testing.assert_close(got, softmax_of(case), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "dtype"), in_turn([*CASES], [*TOLERANCE]), ids=str)
def test_torch_equals_softmax(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    wanted = softmax_of(case)
    got = run_named("torch", case, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("latent_name", HAVE_LATENTS)
@pytest.mark.parametrize(("name", "dtype"), in_turn([*LATENT_CASES], [*TOLERANCE]), ids=str)
def test_latent_attention_equals_softmax(latent_name: str, name: str, dtype: torch.dtype) -> None:
    case = LATENT_CASES[name]
    got = run_named(latent_name, case, dtype)
    assert got.dtype == dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), softmax_of(case), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("latent_name", HAVE_LATENTS)
def test_latent_blocks_can_be_copied_and_swapped(latent_name: str) -> None:
    """A row reads its latent vectors in copied blocks, and in blocks loaded from host memory."""
    case = replace(LATENT_CASES["mixed"], rows=((0, 10),))
    contents = make_contents(case)
    backend = make_backend(latent_name, replace(case, rows=((0, 30),)).layout(torch.float64))
    wanted = run_backend(backend, case, contents, [[0, 1, 2]], torch.float64)
    first, later = np.array([0, 1, 2], np.int32), np.array([5, 3, 4], np.int32)
    backend.copy_blocks(0, first, later)
    backend.swap_out(0, later, first)
    backend.load(0, first, np.array([6, 7, 8], np.int32))
    for table in ([5, 3, 4], [6, 7, 8]):
        backend.prepare(make_step([RowPart(9, 10, (table,))], case.block_size))
        q_TNL = contents.q[0][9:]
        got = backend.run_latent(1, q_TNL, Scores(HEAD_DIM**-0.5), NUM_VALUES)
        torch.testing.assert_close(got, wanted[9:], rtol=0, atol=1e-12)


def test_backends_without_latent_attention_reject_it() -> None:
    backend = make_within_step("torch", Case([(0, 1)]).layout(torch.float32))
    for call in (
        lambda: backend.write_latent(0, torch.zeros(1, 8)),
        lambda: backend.run_latent(0, torch.zeros(1, 2, 8), Scores(1.0), 6),
    ):
        with pytest.raises(ConfigError, match="latent attention; remove attention_backend"):
            call()


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize(
    ("name", "dtype"), in_turn([*CASES], [torch.float32, torch.bfloat16, torch.float16]), ids=str
)
def test_cpu_equals_softmax(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    wanted = softmax_of(case)
    got = run_named("cpu", case, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    together = Case([(600, 1), (31, 1), (300, 1)], block_size=16)
    contents = make_contents(together)
    backend = make_backend("cpu", together.layout(dtype))
    got = run_backend(backend, together, contents, together.tables(), dtype)
    for row, size in enumerate(together.rows):
        alone = Case([size], block_size=16)
        own = Contents(*([values[row]] for values in (contents.q, contents.k, contents.v)))
        backend = make_backend("cpu", together.layout(dtype))
        single = run_backend(backend, alone, own, [together.tables(seed=1)[row]], dtype)
        assert torch.equal(single[0], got[row])


def test_run_writes_into_the_given_output(name: str) -> None:
    case = CASES["several_new"]
    backend = make_backend(name, case.layout(EXACT[name]))
    wanted = run_backend(backend, case, make_contents(case), case.tables(), EXACT[name])
    q_TNH = torch.cat(
        [x[row[0] :] for x, row in zip(make_contents(case).q, case.rows, strict=True)]
    )
    out_TNH = torch.full_like(wanted, torch.nan)
    found = backend.run(1, q_TNH.to(EXACT[name]), Scores(HEAD_DIM**-0.5), out_TNH)
    assert found is out_TNH and torch.equal(out_TNH, wanted)


def test_rows_read_shared_blocks_written_in_the_same_step(name: str) -> None:
    """Two rows read a prefix that a third row writes."""
    case = Case([(0, 11), (8, 3), (8, 1)])
    contents = make_contents(case)
    for values in (contents.k, contents.v):
        values[1][:8] = values[0][:8]
        values[2][:8] = values[0][:8]
    tables = case.tables()
    tables[1][:2] = tables[0][:2]
    tables[2][:2] = tables[0][:2]
    backend = make_backend(name, case.layout(EXACT[name]))
    got = run_step(backend, case, contents, steps_of(case, tables)[1], EXACT[name])
    check(name, got, case, contents)


def test_queries_may_be_views(name: str) -> None:
    """Heads of queries, keys and values are slices of one tensor."""
    case = Case([(0, 5), (0, 3)])
    contents = make_contents(case)
    q, k, v = torch.cat(
        [torch.cat(values) for values in (contents.q, contents.k, contents.v)], dim=1
    ).split([4, 2, 2], dim=1)
    backend = make_backend(name, case.layout(EXACT[name]))
    backend.prepare(steps_of(case, case.tables())[1])
    backend.write(1, k.to(EXACT[name]), v.to(EXACT[name]))
    got = backend.run(1, q.to(EXACT[name]), Scores(q.shape[-1] ** -0.5))
    check(name, got, case, contents)


@pytest.mark.parametrize("junk", [-1, 0])
def test_blocks_that_left_the_window_are_not_read(name: str, junk: int) -> None:
    case = Case([(37, 1), (21, 5)], window=6)
    contents, tables = make_contents(case), case.tables()
    backend = make_backend(name, case.layout(EXACT[name]))
    run_backend(backend, case, contents, tables, EXACT[name])
    for table, (before, _) in zip(tables, case.rows, strict=True):
        first = (before - 6 + 1) // case.block_size
        table[:first] = [junk] * first
    got = run_step(backend, case, contents, steps_of(case, tables)[1], EXACT[name])
    check(name, got, case, contents)


@pytest.mark.parametrize("junk", [-1, 0])
def test_blocks_of_past_chunks_are_not_read(name: str, junk: int) -> None:
    """The second row's first tokens still attend to the chunk before that of its last token."""
    case = Case([(39, 1), (20, 5), (63, 1)], chunk=8)
    contents, tables = make_contents(case), case.tables()
    backend = make_backend(name, case.layout(EXACT[name]))
    run_backend(backend, case, contents, tables, EXACT[name])
    for table, (before, _) in zip(tables, case.rows, strict=True):
        first = before // 8 * 8 // case.block_size
        table[:first] = [junk] * first
    got = run_step(backend, case, contents, steps_of(case, tables)[1], EXACT[name])
    check(name, got, case, contents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_reused_blocks_does_not_spread(name: str, dtype: torch.dtype) -> None:
    """Rows that later get the blocks of a row with NaN must not be affected."""
    spoiled = Case([(0, 16), (0, 16), (0, 16)])
    case = Case([(0, 5), (9, 1), (4, 3)])
    backend = make_backend(name, spoiled.layout(dtype))
    backend.prepare(steps_of(spoiled, spoiled.tables())[1])
    for layer in (0, 1):
        nan = torch.full((48, 2, HEAD_DIM), torch.nan, dtype=dtype)
        backend.write(layer, nan, nan)
    contents, tables = make_contents(case), [t[:3] for t in spoiled.tables()]
    got = run_backend(backend, case, contents, tables, dtype)
    torch.testing.assert_close(
        got.double(), attend_contiguous(case, contents), rtol=0, atol=TOLERANCE[dtype]
    )


def test_copied_blocks_give_the_same_attention(name: str) -> None:
    case = Case([(0, 10)])
    contents, tables = make_contents(case), [[0, 1, 2]]
    backend = make_backend(name, Case([(0, 30)]).layout(EXACT[name]))
    wanted = run_backend(backend, case, contents, tables, EXACT[name])
    backend.copy_blocks(0, np.array([0, 1, 2], np.int32), np.array([5, 3, 4], np.int32))
    backend.prepare(make_step([RowPart(9, 10, ([5, 3, 4],))], case.block_size))
    got = backend.run(1, contents.q[0][9:].to(EXACT[name]), Scores(HEAD_DIM**-0.5))
    tolerance = TOLERANCE[EXACT[name]]
    torch.testing.assert_close(got, wanted[9:], rtol=0, atol=tolerance)


def test_make_backend_selects_by_name_and_dtype() -> None:
    layout = Case([(0, 1)]).layout
    fast = "torch" if core() is None else "cpu"
    assert make_backend("auto", layout(torch.float32)).name == fast
    assert make_backend("auto", layout(torch.bfloat16)).name == fast
    assert make_backend("auto", layout(torch.float16)).name == fast
    assert make_backend("auto", layout(torch.float64)).name == "reference"
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, cpu, torch"):
        make_backend("magic", layout(torch.float32))
    with pytest.raises(ConfigError, match="bfloat16 and float16, not torch.float64"):
        make_backend("cpu", layout(torch.float64))


def test_stored_block_bytes_count_keys_and_values_of_all_layers() -> None:
    group = CacheGroup("full", (0, 1, 2), num_kv_heads=2, head_dim=8)
    assert group.stored_block_bytes(16, torch.bfloat16.itemsize, "auto") == 2 * 3 * 2 * 8 * 2 * 16


def test_forwarding_backend_forwards_every_method() -> None:
    inner = Mock(spec=AttentionBackend)
    outer = ForwardingBackend(inner)
    methods = {k: f for k, f in vars(AttentionBackend).items() if inspect.isfunction(f)}
    for name, method in methods.items():
        given = [object() for _ in inspect.signature(method).parameters][1:]
        returned = getattr(outer, name)(*given)
        getattr(inner, name).assert_called_once_with(*given)
        assert returned is None or returned is getattr(inner, name).return_value
    assert {"run", "run_part", "delta_rule", "rotary_write"} <= set(methods)
    assert outer.host_blocks is inner.host_blocks
