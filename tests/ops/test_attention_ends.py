"""Compare bidirectional attention inside spans with a plain softmax, for all backends.

Covers `ends_T` of `AttentionStep`.
"""

from dataclasses import replace

import pytest
import torch

from quire.ops.attention.cpu import CpuBackend, variants
from quire.ops.attention.select import make_backend
from quire.ops.host.native import core
from tests.support.kernels.attention_cases import (
    Case,
    Contents,
    make_contents,
    run_backend,
    run_named,
    softmax_of,
)

# A text row that decodes, a prompt with two spans, a chunk that begins with one, a text prompt.
ROWS = [(30, 1), (0, 40), (10, 20), (0, 9)]
SPANS = ((1, 3, 12), (1, 20, 33), (2, 10, 24))
CASES = {
    "full": Case(ROWS, spans=SPANS),
    "block_1": Case(ROWS, block_size=1, spans=SPANS),
    "block_16": Case(ROWS, block_size=16, spans=SPANS),
    "larger_window": Case(ROWS, window=15, spans=SPANS),
    "smaller_window": Case(ROWS, window=5, spans=SPANS),
    "window_1": Case(ROWS, window=1, block_size=3, spans=SPANS),
    "all_of_a_row": Case([(0, 18), (7, 1)], spans=((0, 0, 18),)),
    "begins_before_the_step": Case([(6, 20), (16, 1)], window=4, spans=((0, 2, 17),)),
    "neighbours": Case([(0, 30)], spans=((0, 2, 11), (0, 11, 20)), heads=6, kv_heads=1),
    "cap_sinks": Case(ROWS, window=6, soft_cap=2.0, has_sinks=True, spans=SPANS),
    "long": Case([(250, 300), (3, 90), (600, 1)], 16, spans=((0, 255, 520), (1, 40, 80))),
    "long_window": Case([(250, 300), (600, 1)], 16, window=100, spans=((0, 270, 530),)),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
NEEDS_CORE = pytest.mark.skipif(core() is None, reason="the C++ core was not built")


@EACH_CASE
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_spans_are_bidirectional(name: str, case: Case) -> None:
    got = run_named(name, case, torch.float64)
    torch.testing.assert_close(got, softmax_of(case), rtol=0, atol=1e-12)


@NEEDS_CORE
@EACH_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", variants())
def test_spans_are_bidirectional_in_every_variant_of_the_core(
    variant: str, dtype: torch.dtype, case: Case
) -> None:
    backend = CpuBackend(case.layout(dtype), variant=variant)
    got = run_backend(backend, case, make_contents(case), case.tables(), dtype)
    torch.testing.assert_close(got.double(), softmax_of(case), rtol=0, atol=TOLERANCE[dtype])


def alone(case: Case, row: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the attention of one row that is computed alone."""
    spans = tuple((0, first, end) for r, first, end in case.spans if r == row)
    single = replace(case, rows=[case.rows[row]], spans=spans)
    contents = make_contents(case)
    own = Contents(*([values[row]] for values in (contents.q, contents.k, contents.v)))
    backend = make_backend("cpu", case.layout(dtype))
    return run_backend(backend, single, own, [case.tables(seed=1)[row]], dtype)


@NEEDS_CORE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["full", "smaller_window", "long", "long_window"])
def test_row_with_spans_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    together = run_named("cpu", case, dtype)
    rows = together.split([new for _, new in case.rows])
    for row, got in enumerate(rows):
        assert torch.equal(got, alone(case, row, dtype))


@NEEDS_CORE
@pytest.mark.parametrize("window", [None, 5])
def test_text_has_the_bits_of_a_step_without_spans(window: int | None) -> None:
    """Spans change no token outside of them, and not their last token."""
    case = replace(CASES["full"], window=window)
    with_spans = run_named("cpu", case, torch.float32)
    without = run_named("cpu", replace(case, spans=()), torch.float32)
    same_T = (with_spans == without).flatten(1).all(1)
    assert case.ends_T is not None
    in_span_T = case.ends_T > 0
    assert same_T.numpy()[~in_span_T].all()
    last_of_a_span = (1 + 11, 1 + 32, 41 + 13)  # attends to the same tokens without a span
    assert same_T[list(last_of_a_span)].all()
    assert not same_T.numpy()[in_span_T].all()


@NEEDS_CORE
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunk_that_begins_inside_a_span_has_the_same_bits(
    dtype: torch.dtype, window: int | None
) -> None:
    """A prefix hit may end inside a span; its keys were computed with the whole span."""
    whole = Case([(0, 60)], window=window, spans=((0, 8, 44),))
    rest = Case([(20, 40)], window=window, spans=((0, 8, 44),))
    contents = make_contents(whole)
    got = [
        run_backend(make_backend("cpu", case.layout(dtype)), case, contents, case.tables(), dtype)
        for case in (whole, rest)
    ]
    assert torch.equal(got[0][20:], got[1])


@NEEDS_CORE
def test_rows_that_share_blocks_may_have_spans() -> None:
    """Two rows share the first 300 tokens; one of them has a span after these."""
    case = Case([(300, 12), (300, 3)], 4, spans=((0, 301, 310),))
    contents, tables = make_contents(case), case.tables()
    for values in (contents.k, contents.v):
        values[1][:300] = values[0][:300]
    tables[1][:75] = tables[0][:75]
    together, apart = (
        run_backend(
            CpuBackend(case.layout(torch.float32), cascade=cascade),
            case, contents, tables, torch.float32,
        )
        for cascade in (True, False)
    )  # fmt: skip
    assert torch.equal(together, apart)
    assert not torch.equal(together[:12], run_rows_causally(case, contents, tables)[:12])


def run_rows_causally(case: Case, contents: Contents, tables: list[list[int]]) -> torch.Tensor:
    """Run the case as if it had no spans."""
    causal = replace(case, spans=())
    backend = CpuBackend(case.layout(torch.float32))
    return run_backend(backend, causal, contents, tables, torch.float32)
