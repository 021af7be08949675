"""Attention of the C++ core equals a plain softmax, with the same bits in any division of work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import KV_FORMATS, CpuBackend, variants
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention_inputs import Scores
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.ops.weights.formats import chosen_variant
from quire.spec.cache_group import CacheGroup
from tests.support.cases import pairwise, slow_but
from tests.support.kernels.attention_cases import (
    HEAD_DIM,
    Case,
    Contents,
    attend_contiguous,
    make_contents,
    run_backend,
    softmax_of,
)
from tests.support.kernels.latent_cases import as_fp8
from tests.support.models.paged_forward import CPU, RowPart, make_step

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core was not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
MIXED = [(0, 9), (300, 1), (5, 7), (0, 1), (31, 1), (3, 90), (200, 70)]
CASES = {
    "block_1": Case(MIXED, block_size=1),
    "block_3": Case(MIXED, block_size=3),
    "block_16": Case(MIXED, block_size=16),
    "block_256": Case(MIXED, block_size=256),
    "multi_query": Case(MIXED, heads=8, kv_heads=1, block_size=16),
    "multi_head": Case(MIXED, heads=3, kv_heads=3, block_size=16),
    "window_5": Case(MIXED, window=5),
    "window_290": Case([*MIXED, (700, 100)], window=290, block_size=16),
    "many_heads": Case([(40, 3), (0, 70)], heads=70, kv_heads=1, block_size=16),
    "cap": Case(MIXED, soft_cap=0.7, block_size=16),
    "cap_30_window": Case([*MIXED, (700, 100)], window=290, soft_cap=30.0, heads=3, kv_heads=3),
    "sinks": Case(MIXED, has_sinks=True, block_size=16),
    "sinks_multi_query": Case(MIXED, has_sinks=True, heads=6, kv_heads=1, block_size=16),
    "cap_sinks_window": Case([*MIXED, (700, 100)], 1, window=5, soft_cap=2.0, has_sinks=True),
}


@dataclass
class Sequences:
    """Whole sequences, [length, heads, H] each; blocks of different sequences are different."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        return [len(q) for q in self.q]

    def only(self, row: int) -> "Sequences":
        return Sequences([self.q[row]], [self.k[row]], [self.v[row]])


def make_sequences(
    lengths: Sequence[int], dtype: torch.dtype = torch.float32, head_dim: int = 32
) -> Sequences:
    """Return random sequences with four query heads and two KV heads."""
    generator = torch.Generator().manual_seed(1)

    def values(heads: int) -> list[torch.Tensor]:
        return [torch.randn(n, heads, head_dim, generator=generator).to(dtype) for n in lengths]

    return Sequences(values(4), values(2), values(2))


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("cap", [0.05, 1.0, 50.0, 1e4, 1e30])
def test_soft_cap_is_exact_up_to_rounding(cap: float, variant: str) -> None:
    """One of two tokens has score 0 and value 0, so the result is the weight of the other."""
    scores = torch.logspace(-6, 6, 500).float()
    q = torch.cat([scores, -scores])[:, None, None].expand(-1, 1, 8).contiguous()
    kv = torch.zeros(2, 1, 8)
    kv[1, 0, 0] = 1.0
    rows = range(len(q))  # all in one step, each with a block of its own
    layout = Case([(1, 1)] * len(q), block_size=2, heads=1, kv_heads=1).layout(torch.float32)
    layout = replace(layout, groups=(CacheGroup("full", (0,), 1, 8),))
    backend = CpuBackend(layout, variant=variant)
    backend.prepare(make_step([RowPart(0, 2, ([row],)) for row in rows], 2))
    backend.write(0, kv.repeat(len(q), 1, 1), kv.repeat(len(q), 1, 1))
    got = backend.run(0, q.repeat_interleave(2, dim=0)[:, :1], Scores(1.0, cap))[1::2, 0, 0]
    exact = cap * torch.tanh(torch.cat([scores, -scores]).double() / cap)
    wanted = torch.sigmoid(exact)
    # A score's relative error of 3e-7 is at most 0.28 of it in the weight's absolute one.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-7)


@dataclass(frozen=True)
class Cut:
    """How sequences are computed. steps: tokens of each row in each step."""

    steps: Sequence[Sequence[int]]
    block_size: int = 16
    window: int | None = None
    kv_format: str = "auto"
    variant: str | None = None
    split: bool = True
    cascade: bool = True
    soft_cap: float | None = None
    has_sinks: bool = False
    shared: int = 0  # leading tokens whose blocks all rows share


def make_backend(cut: Cut, sequences: Sequences) -> tuple[CpuBackend, list[list[int]]]:
    """Return a backend, and the rows' tables of blocks in random order."""
    first = sequences.k[0]
    counts = [-(-n // cut.block_size) for n in sequences.lengths]
    kind = "full" if cut.window is None else "window"
    group = CacheGroup(kind, (0,), first.shape[1], first.shape[2], cut.window)
    layout = KVLayout((group,), (sum(counts) + 1,), cut.block_size, first.dtype, CPU, cut.kv_format)
    backend = CpuBackend(layout, variant=cut.variant, split=cut.split, cascade=cut.cascade)
    order = np.random.default_rng(3).permutation(sum(counts) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    same = cut.shared // cut.block_size
    return backend, [tables[0][:same] + table[same:] for table in tables]


def compute(cut: Cut, sequences: Sequences) -> list[torch.Tensor]:
    """Return the attention of each sequence, [length, N, H]."""
    backend, tables = make_backend(cut, sequences)
    done = [0] * len(tables)
    outs: list[list[torch.Tensor]] = [[] for _ in tables]
    for lens in cut.steps:
        rows = [r for r, n in enumerate(lens) if n]
        parts = [RowPart(done[r], done[r] + lens[r], (tables[r],)) for r in rows]
        q, k, v = (
            torch.cat([x[r][done[r] : done[r] + lens[r]] for r in rows])
            for x in (sequences.q, sequences.k, sequences.v)
        )
        backend.prepare(make_step(parts, cut.block_size))
        backend.write(0, k, v)
        sinks_N = torch.tensor([0.5, 5.0, -torch.inf, -1.0]) if cut.has_sinks else None
        scale = q.shape[-1] ** -0.5
        out = backend.run(0, q, Scores(scale, cut.soft_cap, sinks_N))
        for r, piece in zip(rows, out.split([lens[r] for r in rows]), strict=True):
            outs[r].append(piece)
            done[r] += lens[r]
    return [torch.cat(pieces) for pieces in outs]


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Return whether all values are equal, where NaN equals NaN."""
    return all(
        np.array_equal(x.float().numpy(), y.float().numpy(), equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads after the test."""
    yield
    set_num_threads(None)


@pytest.mark.parametrize(
    ("name", "variant", "dtype"), pairwise(list(CASES), list(variants()), DTYPES), ids=str
)
def test_every_variant_equals_softmax(name: str, variant: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    contents = make_contents(case)
    backend = CpuBackend(case.layout(dtype), variant=variant)
    got = run_backend(backend, case, contents, case.tables(), dtype)
    torch.testing.assert_close(got.double(), softmax_of(case), rtol=0, atol=TOLERANCE[dtype])


def as_int8(values: torch.Tensor) -> torch.Tensor:
    """Return [..., H] after a conversion to int8 and back, in float64."""
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest == 0, 0.0, torch.tensor(127.0) / largest)
    return (values * inverse).round().double() * (largest / 127.0).double()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_int8_attention_equals_softmax_of_stored_values(case: Case) -> None:
    contents = make_contents(case)
    contents.k[0][0, 0] = 0.0
    stored = Contents(
        contents.q, [as_int8(k) for k in contents.k], [as_int8(v) for v in contents.v]
    )
    wanted, exact = attend_contiguous(case, stored), attend_contiguous(case, contents)
    layout = replace(case.layout(torch.float32), kv_format="int8")
    for variant in variants():
        got = run_backend(
            CpuBackend(layout, variant=variant), case, contents, case.tables(), torch.float32
        )
        torch.testing.assert_close(
            got.double(), wanted, rtol=0, atol=2e-5, msg=lambda text, v=variant: f"{v}: {text}"
        )
        assert (got.double() - exact).abs().max() < 0.08, variant
        assert (got.double() - exact).square().mean().sqrt() < 0.01, variant


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fp8_attention_equals_softmax_of_stored_values(case: Case) -> None:
    """Values beyond the range saturate; others are rounded to the nearest."""
    k_scale, v_scale = 0.002, 0.05
    contents = make_contents(case)
    contents.v[0][0, 0] *= 1e-3
    stored = Contents(
        contents.q,
        [as_fp8(k, k_scale).double() for k in contents.k],
        [as_fp8(v, v_scale).double() for v in contents.v],
    )
    layout = replace(case.layout(torch.float32), kv_format="fp8")
    for variant in variants():
        scales = dict.fromkeys(range(8), (k_scale, v_scale))
        backend = CpuBackend(layout, variant=variant, scales=scales)
        got = run_backend(backend, case, contents, case.tables(), torch.float32)
        wanted = attend_contiguous(case, stored)
        torch.testing.assert_close(
            got.double(), wanted, rtol=0, atol=2e-5, msg=lambda text, v=variant: f"{v}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_may_have_a_wider_dtype_than_keys(dtype: torch.dtype) -> None:
    case = CASES["block_16"]
    contents = make_contents(case)
    backend = CpuBackend(case.layout(dtype))
    run_backend(backend, case, contents, case.tables(), dtype)
    q = torch.cat([x[row[0] :] for x, row in zip(contents.q, case.rows, strict=True)])
    got = backend.run(1, q.float(), Scores(HEAD_DIM**-0.5))
    stored = Contents(
        contents.q,
        [k.to(dtype).double() for k in contents.k],
        [v.to(dtype).double() for v in contents.v],
    )
    assert got.dtype == torch.float32
    wanted = attend_contiguous(case, stored)
    dots = dtype == torch.bfloat16 and chosen_variant("bfloat16") in ("avx512_bf16", "amx")
    tolerance = 1e-2 if dots else 2e-5  # dots round queries and weights to bfloat16
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)
    assert (got.double() - wanted).square().mean().sqrt() < tolerance / 5


def test_stride_of_a_single_head_is_ignored() -> None:
    """Transposed keys [1, T, H] have such a stride."""
    case = CASES["multi_query"]
    contents = make_contents(case)
    backend = CpuBackend(case.layout(torch.float32))
    run_backend(backend, case, contents, case.tables(), torch.float32)
    q, k, v = (
        torch.cat([x[row[0] :] for x, row in zip(values, case.rows, strict=True)]).float()
        for values in (contents.q, contents.k, contents.v)
    )
    by_head = [torch.empty(1, *x[:, 0].shape).copy_(x.transpose(0, 1)) for x in (k * 2, v)]
    backend.write(1, *(x.transpose(0, 1) for x in by_head))
    doubled = backend.run(1, q / 2, Scores(HEAD_DIM**-0.5))
    backend.write(1, k * 2, v)
    assert torch.equal(doubled, backend.run(1, q / 2, Scores(HEAD_DIM**-0.5)))


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("head_dim", [2, 8, 20, 72, 80, 128])
def test_any_head_size_equals_softmax(head_dim: int, kv_format: str, variant: str) -> None:
    sequences = make_sequences([70, 3], torch.bfloat16, head_dim)
    cut = Cut([(60, 3), (10, 0)], kv_format=kv_format, variant=variant)
    if kv_format == "fp8" and head_dim < 4:
        with pytest.raises(ConfigError, match="fp8 needs heads of at least 4 numbers"):
            compute(cut, sequences)
        return
    for out, q, k, v in zip(
        compute(cut, sequences), sequences.q, sequences.k, sequences.v, strict=True
    ):
        if kv_format == "int8":
            k, v = as_int8(k), as_int8(v)
        if kv_format == "fp8":
            k, v = as_fp8(k, 1.0), as_fp8(v, 1.0)
        k, v = (x.double().repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.double().transpose(0, 1), k, v, is_causal=True
        )
        torch.testing.assert_close(out.double(), wanted.transpose(0, 1), rtol=0, atol=4e-2)


EXTRAS: list[dict[str, Any]] = [{}, {"soft_cap": 2.0, "has_sinks": True}]
STORED = [
    ("auto", torch.float32),
    ("auto", torch.bfloat16),
    ("int8", torch.float32),
    ("fp8", torch.float32),
]
STORED_IDS = ["float32", "bfloat16", "int8", "fp8"]


@pytest.mark.parametrize(
    ("variant", "stored", "window", "extras"),
    pairwise(list(variants()), STORED_IDS, [None, 100], EXTRAS),
)
def test_bits_do_not_depend_on_chunks_blocks_or_threads(
    extras: dict[str, Any], stored: str, window: int | None, variant: str, threads: None
) -> None:
    kv_format, dtype = STORED[STORED_IDS.index(stored)]
    sequences = make_sequences([700, 300, 31], dtype)
    whole = Cut([(700, 300, 31)], 16, window, kv_format, variant, **extras)
    wanted = compute(whole, sequences)
    for row, length in enumerate(sequences.lengths):
        alone = compute(replace(whole, steps=[(length,)]), sequences.only(row))
        assert same_bits(alone, wanted[row : row + 1]), f"row {row} alone"
    chunks = [(257, 1, 0), (1, 255, 5), (300, 2, 20), (7, 40, 1), (134, 1, 4), (1, 1, 1)]
    for block_size in (1, 3, 16, 256):
        cut = replace(whole, block_size=block_size, steps=chunks)
        assert same_bits(compute(cut, sequences), wanted), f"chunks, blocks of {block_size}"
    for count in (1, 2, 3):
        set_num_threads(count)
        assert same_bits(compute(whole, sequences), wanted), f"{count} threads"


@pytest.mark.parametrize(
    ("variant", "has_window", "length", "extras"),
    pairwise(
        list(variants()), [False, True], [2000, pytest.param(4000, marks=pytest.mark.slow)], EXTRAS
    ),
)
def test_splitting_a_context_does_not_change_bits(
    extras: dict[str, Any], length: int, has_window: bool, variant: str, threads: None
) -> None:
    sequences = make_sequences([length, 40])
    window = length // 2 if has_window else None
    cut = Cut([(length - 40, 39), (1, 1), (39, 0)], 16, window, variant=variant, **extras)
    wanted = compute(replace(cut, split=False), sequences)
    for count in (2, 16):
        set_num_threads(count)
        assert same_bits(compute(cut, sequences), wanted)


def test_long_contexts_are_split_for_several_threads(threads: None) -> None:
    sequences = make_sequences([6000])
    backend, tables = make_backend(Cut([]), sequences)
    step = make_step([RowPart(5999, 6000, (tables[0],))], 16)
    set_num_threads(1)
    backend.prepare(step)
    assert backend.plan(0, 2).num_items == 1
    set_num_threads(4)
    backend.prepare(step)
    assert backend.plan(0, 2).num_items > 4
    assert backend.plan(0, 2).num_merges == 1


def make_shared(shared: int, lengths: Sequence[int]) -> Sequences:
    """Return sequences that begin with the same tokens."""
    sequences = make_sequences(lengths)
    for values in (sequences.q, sequences.k, sequences.v):
        for other in values[1:]:
            other[:shared] = values[0][:shared]
    return sequences


@pytest.mark.parametrize(
    ("block_size", "variant", "extras"),
    pairwise(slow_but((3, 16, 256), 3, 16), list(variants()), EXTRAS),
)
def test_sharing_blocks_does_not_change_bits(
    extras: dict[str, Any], block_size: int, variant: str, threads: None
) -> None:
    shared = 768
    sequences = make_shared(shared, [1100, 800, 769, 900])
    # The rows after the first begin with blocks that it wrote, in the same or an earlier step.
    steps = [(1000, 0, 0, 0), (9, 0, 0, 0), (91, 800, 769, 900)]
    cut = Cut(steps, block_size, variant=variant, **extras)
    apart = compute(replace(cut, cascade=False), sequences)
    steps = [(1000, 760, 768, 768), (90, 8, 0, 100), (1, 10, 1, 12), (9, 22, 0, 20)]
    cut = replace(cut, steps=steps, shared=shared)
    for count in (1, 2, 16):
        set_num_threads(count)
        assert same_bits(compute(cut, sequences), apart)


def test_shared_spans_are_read_once(threads: None) -> None:
    """Three rows share two spans. A fourth row, which has one of these, does not join them."""
    set_num_threads(1)
    contexts = [800, 800, 790, 300]
    backend, tables = make_backend(Cut([], shared=512), make_shared(512, [800, 800, 790, 600]))
    parts = [RowPart(n - 1, n, (t,)) for n, t in zip(contexts, tables, strict=True)]
    backend.prepare(make_step(parts, 16))
    plan = backend.plan(0, 2)
    assert (plan.num_items, plan.num_merges) == (1 + 4, 3)


@pytest.mark.parametrize(
    ("variant", "stored", "bad", "extras"),
    pairwise(list(variants()), STORED_IDS, [torch.nan, torch.inf], EXTRAS),
)
def test_nonfinite_values_reach_only_queries_that_attend_to_them(
    extras: dict[str, Any], bad: float, stored: str, variant: str
) -> None:
    """Queries before the bad token, and queries whose window has left it, keep their bits."""
    kv_format, dtype = STORED[STORED_IDS.index(stored)]
    if kv_format == "fp8":
        bad = torch.nan  # an infinity is stored as 448
    decoded = [(250,), *[(1,)] * 90, (60,)]  # from before the bad token until it has left
    for name, at in [("k", 270), ("v", 270), ("v", 271)]:
        sequences = make_sequences([400], dtype)
        cut = Cut([(400,)], 16, 50, kv_format, variant, **extras)
        (wanted,) = compute(cut, sequences)
        getattr(sequences, name)[0][at] = bad
        (got,) = compute(cut, sequences)
        assert same_bits([got[:at], got[at + 50 :]], [wanted[:at], wanted[at + 50 :]])
        assert not got[at : at + 50].isfinite().any()
        assert same_bits(compute(replace(cut, steps=decoded), sequences), [got])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_blocks_can_be_copied_and_swapped(kv_format: str) -> None:
    sequences = make_sequences([40])
    backend, tables = make_backend(Cut([], kv_format=kv_format), sequences)
    q, k, v = sequences.q[0], sequences.k[0], sequences.v[0]
    backend.prepare(make_step([RowPart(0, 40, (tables[0],))], 16))
    backend.write(0, k, v)
    wanted = backend.run(0, q, Scores(0.2))
    used = np.array(tables[0], np.int32)
    (free,) = set(range(4)) - set(tables[0])
    backend.copy_blocks(0, used[:1], np.array([free], np.int32))
    backend.swap_out(0, used[1:], used[1:])
    backend.write(0, torch.zeros_like(k), torch.zeros_like(v))
    backend.load(0, used[1:], used[1:])
    backend.prepare(make_step([RowPart(0, 40, ([free, *tables[0][1:]],))], 16))
    assert torch.equal(backend.run(0, q, Scores(0.2)), wanted)


def test_torch_and_reference_backends_reject_int8() -> None:
    layout = replace(Case([(0, 1)]).layout(torch.float32), kv_format="int8")
    for backend in (TorchBackend, ReferenceBackend):
        with pytest.raises(ConfigError, match="not as int8"):
            backend(layout)
    with pytest.raises(ConfigError, match="auto, int8 or fp8, not 'int3'"):
        CpuBackend(replace(layout, kv_format="int3"))


@pytest.mark.parametrize(
    ("dtype", "kv_format", "format"),
    [
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.bfloat16, "int8", "float32"),
        (torch.float16, "auto", "float32"),
        (torch.float32, "auto", "float32"),
    ],
)
def test_kv_format_selects_the_instruction_set(
    dtype: torch.dtype, kv_format: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instruction sets of float32 and of bfloat16 may differ."""
    names = list(variants())
    chosen = {"float32": names[0], "bfloat16": names[-1]}
    monkeypatch.setattr("quire.ops.attention.cpu.chosen_variant", chosen.__getitem__)
    layout = replace(Case([(0, 1)]).layout(dtype), kv_format=kv_format)
    assert CpuBackend(layout).variant == variants()[chosen[format]]
