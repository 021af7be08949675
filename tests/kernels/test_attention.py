"""Compare Triton's paged attention with one softmax per row over contiguous memory.

Covers `ops/kernels/attention/attention_merge.py`.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.attention import select, triton_gpu
from quire.ops.attention.base import KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.host.native import core
from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.launch import INTERPRETED
from quire.spec.cache_group import CacheGroup
from tests.support.cases import slow_but
from tests.support.kernels.cpp_blocks import row_by_row, scales_after_rows
from tests.support.models.paged_forward import CPU, RowPart, make_step

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Chunks of few keys, so that short contexts are cut into many parts.
FINE = Cut(max_splits=8, short_chunk=16, long_chunk=32, align=16)
COARSE = Cut(max_splits=4, short_chunk=128, long_chunk=128)
MIXED = ((0, 9), (30, 1), (5, 7), (0, 1), (3, 70))

SPANS = ((0, 1, 6), (2, 5, 12), (4, 3, 33), (4, 35, 73))  # of MIXED


@dataclass(frozen=True)
class Case:
    """Rows as (tokens before the step, tokens of the step). spans: (row, first, end) of positions
    whose tokens attend to each other."""

    rows: tuple[tuple[int, int], ...] = MIXED
    group_size: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    cut: Cut = FINE
    kv_format: str = "auto"
    soft_cap: float | None = None
    sinks: bool = False
    spans: tuple[tuple[int, int, int], ...] = ()

    def ends_T(self, rows: list[int]) -> np.ndarray | None:
        """Return the span end of each token in a step of these rows, 0 outside spans."""
        if not self.spans:
            return None
        ends = [np.zeros(sum(row), np.int32) for row in self.rows]
        for row, first, end in self.spans:
            ends[row][first:end] = end
        return np.concatenate([ends[row][self.rows[row][0] :] for row in rows])

    @property
    def scale(self) -> float:
        return 2.0 * self.head_dim**-0.5

    def tables(self, seed: int = 0) -> list[list[int]]:
        """Return scattered blocks for each row; rows share none."""
        sizes = [-(-sum(row) // self.block_size) for row in self.rows]
        order = np.random.default_rng(seed).permutation(sum(sizes) + 2).tolist()
        return [[order.pop() for _ in range(size)] for size in sizes]

    def layout(self, dtype: torch.dtype, device: torch.device, num_blocks: int = 0) -> KVLayout:
        kind = "chunked" if self.chunk else "full" if self.window is None else "window"
        span = self.chunk or self.window
        group = CacheGroup(kind, (0, 1), self.kv_heads, self.head_dim, span)
        num_blocks = num_blocks or sum(len(table) for table in self.tables()) + 2
        return KVLayout((group,), (num_blocks,), self.block_size, dtype, device, self.kv_format)


@dataclass(frozen=True)
class Contents:
    """q, k, v of all tokens of each row, and the heads' sinks."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    sinks: torch.Tensor


def make_contents(case: Case, seed: int = 0) -> Contents:
    generator = torch.Generator().manual_seed(seed)
    heads = case.kv_heads * case.group_size

    def rows(num_heads: int) -> list[torch.Tensor]:
        shapes = [(sum(row), num_heads, case.head_dim) for row in case.rows]
        return [torch.randn(shape, generator=generator) for shape in shapes]

    q, k, v = rows(heads), rows(case.kv_heads), rows(case.kv_heads)
    return Contents(q, k, v, torch.randn(heads, generator=generator))


def on(device: torch.device, step: AttentionStep) -> AttentionStep:
    return replace(
        step,
        positions_T=step.positions_T.to(device),
        query_starts_S1=step.query_starts_S1.to(device),
        context_lens_S=step.context_lens_S.to(device),
        slots_T=tuple(slots.to(device) for slots in step.slots_T),
        block_tables_SL=tuple(table.to(device) for table in step.block_tables_SL),
        has_drafts_S=None if step.has_drafts_S is None else step.has_drafts_S.to(device),
    )


def poison(backend: TritonBackend, case: Case) -> None:
    """Fill the memory with NaN, the scales of int8 too, to expose reads of unwritten slots."""
    for kv in backend._memory.kv:
        if case.kv_format == "auto":
            kv.fill_(torch.nan)
        else:
            kv.fill_(255 if case.kv_format == "int8" else 127)


def write_before(
    backend: TritonBackend, case: Case, contents: Contents, tables: list[list[int]], layer: int = 1
) -> None:
    """Write the keys and values of the tokens before the step."""
    rows = [r for r, (before, _) in enumerate(case.rows) if before]
    if not rows:
        return
    layout = backend._layout
    parts = [RowPart(0, case.rows[r][0], (tables[r],)) for r in rows]
    backend.prepare(on(layout.device, make_step(parts, case.block_size)))
    k, v = (
        torch.cat([values[r][: case.rows[r][0]] for r in rows]).to(layout.device, layout.dtype)
        for values in (contents.k, contents.v)
    )
    backend.write(layer, k, v)


def run_step(
    backend: TritonBackend,
    case: Case,
    contents: Contents,
    tables: list[list[int]],
    rows: list[int] | None = None,
    layer: int = 1,
) -> torch.Tensor:
    """Prepare, write and run the step of these rows (all if absent): [T, N, H]."""
    layout = backend._layout
    rows = list(range(len(case.rows))) if rows is None else rows
    parts = [RowPart(case.rows[r][0], sum(case.rows[r]), (tables[r],)) for r in rows]
    step = replace(make_step(parts, case.block_size), ends_T=case.ends_T(rows))
    backend.prepare(on(layout.device, step))
    q, k, v = (
        torch.cat([values[r][case.rows[r][0] :] for r in rows]).to(layout.device, layout.dtype)
        for values in (contents.q, contents.k, contents.v)
    )
    backend.write(layer, k, v)
    sinks = contents.sinks.to(layout.device) if case.sinks else None
    return backend.run(layer, q, Scores(case.scale, case.soft_cap, sinks))


def softmax_rows(case: Case, contents: Contents) -> torch.Tensor:
    """Return the step's attention by one softmax per row, in float64: [T, N, H]."""
    outs = []
    sequences = zip(case.rows, contents.q, contents.k, contents.v, strict=True)
    for row, ((before, _), *qkv) in enumerate(sequences):
        q, k, v = (x.double() for x in qkv)
        k, v = (x.repeat_interleave(case.group_size, dim=1) for x in (k, v))
        scores = torch.einsum("qnh,cnh->nqc", q, k) * case.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        query, key = torch.arange(len(q))[:, None], torch.arange(len(q))
        hidden = key > query
        for of_row, first, end in case.spans:
            if of_row == row:
                hidden &= ~((query >= first) & (query < end) & (key < end))
        if case.window is not None:
            hidden |= key <= query - case.window
        if case.chunk is not None:
            hidden |= key // case.chunk < query // case.chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if case.sinks:
            sink = contents.sinks.double()[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        outs.append(torch.einsum("nqc,cnh->qnh", weights, v)[before:])
    return torch.cat(outs)


def check(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    """Compare attention over scattered blocks, whose unused slots are NaN, with one softmax."""
    contents, tables = make_contents(case, seed), case.tables(seed)
    backend = TritonBackend(case.layout(dtype, device), cut=case.cut)
    poison(backend, case)
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    assert got.dtype == dtype
    rounded = replace(
        contents,
        **{name: [x.to(dtype) for x in getattr(contents, name)] for name in ("q", "k", "v")},
    )
    wanted = softmax_rows(case, rounded)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=TOLERANCE[dtype])


CASES = {
    "mixed": Case(kv_heads=2),
    "decode": Case(((17, 1), (1, 1), (40, 1), (160, 1))),
    "uncut": Case(cut=Cut()),
    "one": Case(((0, 1),)),
    "multi_query": Case(group_size=8),
    "multi_head": Case(((0, 9), (30, 1), (5, 20)), group_size=1, kv_heads=3),
    "group_7": Case(group_size=7),
    "group_20": Case(((30, 1), (3, 9)), group_size=20),
    "verify": Case(((50, 4), (33, 3), (20, 2)), group_size=4),
    "long_tiles": Case(((40, 70),), group_size=4, cut=COARSE),
    "block_3": Case(block_size=3),
    "block_32": Case(block_size=32),
    "block_64": Case(block_size=64),
    "edges_of_tiles": Case(((126, 10), (127, 10)), cut=COARSE),
    "edges_of_windows": Case(((140, 20), (141, 1)), window=14, cut=COARSE),
    "window_1": Case(window=1),
    "window_5": Case(window=5),
    "window_64": Case(((150, 70), (120, 1), (10, 3)), window=64, cut=COARSE),
    "window_300": Case(((537, 20), (350, 1)), window=300, cut=COARSE),
    "window_larger": Case(window=1000),
    "edges_of_chunks": Case(((136, 20), (139, 1), (140, 1), (141, 1)), chunk=14, cut=COARSE),
    "chunk_1": Case(chunk=1),
    "chunk_5": Case(chunk=5),
    "chunk_64": Case(((150, 70), (120, 1), (128, 3)), chunk=64, cut=COARSE),
    "chunk_300": Case(((537, 20), (595, 70), (599, 1)), chunk=300, cut=COARSE),
    "chunk_larger": Case(chunk=1000),
    "chunk_sinks_spans": Case(spans=SPANS, chunk=12, sinks=True, soft_cap=3.0),
    "head_80": Case(((30, 1), (3, 20)), head_dim=80),
    "head_96": Case(((30, 1), (3, 20)), head_dim=96),
    "head_128": Case(((30, 1), (3, 20)), head_dim=128),
    "head_256": Case(((30, 1), (3, 20)), head_dim=256),
    "soft_cap": Case(soft_cap=3.0),
    "sinks": Case(sinks=True),
    "sinks_window": Case(((100, 20), (90, 1)), sinks=True, window=64, soft_cap=5.0),
    "spans": Case(spans=SPANS),
    "spans_uncut": Case(spans=SPANS, cut=Cut()),
    "spans_window": Case(spans=SPANS, window=12, sinks=True, soft_cap=3.0),
    "spans_long_tiles": Case(((40, 70), (20, 1)), 4, window=30, cut=COARSE, spans=((0, 45, 95),)),
}
# The interpreter is slow: it runs one case of each dtype but float32.
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]
CLOSE = [torch.float32] if INTERPRETED else DTYPES


# Large cases, and further sizes of features that a quick case covers.
SLOW = {
    "multi_head", "group_20", "block_32", "block_64", "window_1", "window_300", "window_larger",
    "chunk_1", "chunk_64", "chunk_300", "chunk_larger", "head_96", "head_128", "head_256",
    "soft_cap", "sinks", "spans_uncut", "group_7", "window_64", "spans", "chunk_5",
}  # fmt: skip


@pytest.mark.parametrize("close", CLOSE, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, case in CASES.items()
    ],
)
def test_attention_equals_softmax(case: Case, close: torch.dtype, device: torch.device) -> None:
    check(case, close, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_softmax_in_every_dtype(dtype: torch.dtype, device: torch.device) -> None:
    check(Case(((0, 9), (70, 1), (5, 17))), dtype, device)


@pytest.mark.parametrize("seed", slow_but(range(6), 0, 3))
def test_attention_of_random_batches_equals_softmax(seed: int, device: torch.device) -> None:
    random = np.random.default_rng(seed)
    rows = tuple(
        (int(random.integers(0, 100)), int(random.choice([1, 1, 1, 2, 5, 30])))
        for _ in range(random.integers(1, 7))
    )
    case = Case(
        rows,
        group_size=int(random.choice([1, 3, 4])),
        kv_heads=1,
        block_size=int(random.choice([16, 32])),
        window=[None, 20][int(random.integers(2))],
    )
    check(case, torch.float32, device, seed)


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """Return [..., H] after a conversion to int8 and back."""
    largest = x.abs().amax(-1, keepdim=True)
    factor = torch.where(largest == 0, 0.0, torch.tensor(127.0) / largest)
    return (x * factor).round() * (largest / 127.0)


EXTRAS = [{}, {"soft_cap": 3.0, "sinks": True}]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "cap_sinks"])
def test_int8_attention_equals_softmax_of_stored_values(
    extras: dict[str, object], window: int | None, device: torch.device
) -> None:
    case = Case(((0, 9), (70, 1), (5, 17)), kv_format="int8", window=window, **extras)
    contents, tables = make_contents(case), case.tables()
    contents.k[0][0, 0] = 0.0  # the largest magnitude of a vector may be 0
    backend = TritonBackend(case.layout(torch.float32, device), cut=case.cut)
    poison(backend, case)
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    k, v = ([as_int8(x) for x in values] for values in (contents.k, contents.v))
    wanted = softmax_rows(case, replace(contents, k=k, v=v))
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "cap_sinks"])
def test_fp8_attention_applies_key_and_value_scales_per_layer(
    extras: dict[str, object], device: torch.device
) -> None:
    """Inputs are exact in fp8, because the interpreter rounds others wrongly."""
    case = Case(((0, 9), (70, 1), (5, 17)), kv_format="fp8", **extras)
    contents, tables, scales = make_contents(case), case.tables(), (1 / 32, 1 / 16)
    for values, scale in zip((contents.k, contents.v), scales, strict=True):
        values[:] = [(x / scale).to(torch.float8_e4m3fn).float() * scale for x in values]
    layout = case.layout(torch.float32, device)
    backend = TritonBackend(layout, cut=case.cut, scales={1: scales})
    poison(backend, case)
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    wanted = softmax_rows(case, contents)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_fp8_products_in_float16_equal_softmax(is_fixed: bool, device: torch.device) -> None:
    """Large queries must not overflow, and fp8 values must stay exact."""
    case = Case(((0, 9), (70, 1), (5, 17)), kv_format="fp8", cut=FINE)
    contents, tables = make_contents(case), case.tables()
    contents.q[:] = [(x * 500).half().float() for x in contents.q]
    for values in (contents.k, contents.v):
        values[:] = [x.to(torch.float8_e4m3fn).float() for x in values]
    contents.k[:] = [x / 128 for x in contents.k]
    layout = case.layout(torch.float16, device)
    backend = TritonBackend(layout, cut=case.cut, deterministic=is_fixed, scales={1: (1 / 128, 1)})
    poison(backend, case)
    write_before(backend, case, contents, tables)
    got = run_step(backend, case, contents, tables)
    wanted = softmax_rows(case, contents)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=0, atol=TOLERANCE[torch.float16])


def test_block_table_entries_that_no_token_reads_are_ignored(device: torch.device) -> None:
    """These are entries of blocks that left the window, and entries after the context."""
    case = Case(((150, 1), (90, 20)), window=20)
    contents, tables = make_contents(case), case.tables()
    backend = TritonBackend(case.layout(torch.float32, device), cut=case.cut)
    write_before(backend, case, contents, tables)
    for table, (before, _) in zip(tables, case.rows, strict=True):
        first = (before - 20 + 1) // case.block_size
        table[:first] = [-1] * first
        table += [-1, 0]
    got = run_step(backend, case, contents, tables)
    torch.testing.assert_close(got.double().cpu(), softmax_rows(case, contents), rtol=0, atol=2e-5)


def test_rows_read_shared_blocks_written_in_the_same_step(device: torch.device) -> None:
    """Two rows read a prefix that a third row writes."""
    case = Case(((0, 35), (32, 3), (32, 1)))
    contents, tables = make_contents(case), case.tables()
    for values in (contents.k, contents.v):
        values[1][:32] = values[2][:32] = values[0][:32]
    tables[1][:2] = tables[2][:2] = tables[0][:2]
    backend = TritonBackend(case.layout(torch.float32, device), cut=case.cut)
    got = run_step(backend, case, contents, tables)
    torch.testing.assert_close(got.double().cpu(), softmax_rows(case, contents), rtol=0, atol=2e-5)


def test_queries_may_be_views_and_steps_may_be_padded(device: torch.device) -> None:
    """A captured step has rows without tokens, tokens without a row, and slots of -1."""
    case = Case(((20, 3), (40, 1)))
    contents, tables = make_contents(case), case.tables()
    backend = TritonBackend(case.layout(torch.float32, device), cut=case.cut)
    write_before(backend, case, contents, tables)
    parts = [RowPart(b, b + new, (t,)) for (b, new), t in zip(case.rows, tables, strict=True)]
    step = make_step(parts, case.block_size)
    slots_T, table_SL = step.slots_T[0], step.block_tables_SL[0]
    padded = replace(
        step,
        query_starts_S1=torch.nn.functional.pad(step.query_starts_S1, (0, 2), value=4),
        context_lens_S=torch.nn.functional.pad(step.context_lens_S, (0, 2), value=7),
        slots_T=(torch.nn.functional.pad(slots_T, (0, 3), value=-1),),
        block_tables_SL=(torch.nn.functional.pad(table_SL, (0, 0, 0, 2)),),
        query_lens_host=np.array([3, 3, 3, 3], np.int32),
        context_lens_host=np.array([100] * 4, np.int32),
    )
    backend.prepare(on(device, padded))
    new = [
        torch.cat([x[before:] for x, (before, _) in zip(values, case.rows, strict=True)])
        for values in (contents.q, contents.k, contents.v)
    ]
    qkv = torch.nn.functional.pad(torch.cat(new, 1), (0, 0, 0, 0, 0, 3), value=torch.nan)
    q, k, v = qkv.to(device).split([2, 1, 1], dim=1)
    before = backend._memory.kv[0].isnan().sum()
    backend.write(1, k, v)
    got = backend.run(1, q, Scores(case.scale))[:4]
    torch.testing.assert_close(got.double().cpu(), softmax_rows(case, contents), rtol=0, atol=2e-5)
    assert backend._memory.kv[0].isnan().sum() == before


def test_memory_limit_reduces_the_number_of_parts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(((150, 1), (90, 20)))
    monkeypatch.setattr(triton_gpu, "PARTS_BYTES", 40 * 4 * 2 * (32 + 2))
    backend = TritonBackend(case.layout(torch.float32, device), cut=case.cut)
    write_before(backend, case, make_contents(case), case.tables())
    got = run_step(backend, case, make_contents(case), case.tables())
    work = backend._work[0]
    assert work is not None and work.bounds.slots <= 40 and 1 <= work.cut.items < 32
    wanted = softmax_rows(case, make_contents(case))
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_memory_layout_equals_that_of_other_backends(kv_format: str, device: torch.device) -> None:
    """Keys and values of a block are [K, B, P, H]. Bytes of int8 equal the C++ core's, after
    its keys are transposed back and its scales moved after the rows."""
    if kv_format == "int8" and core() is None:
        pytest.skip("the C++ core was not built")
    case = Case(((0, 35), (5, 3)), kv_format=kv_format, kv_heads=3, head_dim=20)
    contents, tables = make_contents(case), case.tables()
    backend = TritonBackend(case.layout(torch.float32, device))
    run_step(backend, case, contents, tables)
    other = make_backend("cpu" if kv_format == "int8" else "torch", case.layout(torch.float32, CPU))
    parts = [RowPart(b, b + new, (t,)) for (b, new), t in zip(case.rows, tables, strict=True)]
    other.prepare(make_step(parts, case.block_size))
    k, v = (
        torch.cat([x[before:] for x, (before, _) in zip(values, case.rows, strict=True)])
        for values in (contents.k, contents.v)
    )
    other.write(1, k, v)
    wanted = other._memory.kv[0]
    if kv_format == "int8":
        wanted = scales_after_rows(row_by_row(wanted, kv_format))
    assert torch.equal(backend._memory.kv[0].cpu(), wanted)


def test_copied_blocks_give_the_same_attention(device: torch.device) -> None:
    case = Case(((30, 10),))
    contents = make_contents(case)
    backend = TritonBackend(case.layout(torch.float32, device, num_blocks=8), cut=case.cut)
    write_before(backend, case, contents, [[0, 1, 2]])
    backend.copy_blocks(0, np.array([0, 1, 2], np.int32), np.array([5, 3, 4], np.int32))
    got = run_step(backend, case, contents, [[5, 3, 4]])
    torch.testing.assert_close(got.double().cpu(), softmax_rows(case, contents), rtol=0, atol=2e-5)


def test_unsupported_layouts_are_rejected(device: torch.device) -> None:
    layout = Case().layout(torch.float64, device)
    with pytest.raises(ConfigError, match="triton cannot be used here: .*not torch.float64"):
        make_backend("triton", layout)
    with pytest.raises(ConfigError, match="heads of up to 256 numbers, not 320"):
        make_backend("triton", Case(head_dim=320).layout(torch.float32, device))
    with pytest.raises(ConfigError, match="not 'int3'"):
        make_backend("triton", Case(kv_format="int3").layout(torch.float32, device))
    assert make_backend("triton", Case().layout(torch.float32, device)).name == "triton"


def test_auto_selects_triton_only_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Case().layout(torch.bfloat16, CPU)
    assert select.fastest(layout) != "triton"
    on_gpu = replace(layout, device=torch.device("cuda"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with caplog.at_level("INFO"):
        assert select.fastest(on_gpu) == "triton"
        assert select.fastest(replace(on_gpu, dtype=torch.float64)) == "reference"
        assert not caplog.records
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert select.fastest(on_gpu) == "torch"
    assert "attention by torch, not triton: the package triton is not installed" in caplog.text
