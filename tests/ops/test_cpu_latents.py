"""Latent attention of the C++ core equals a plain softmax, with the same bits in any division of
work."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.ops.attention.core_calls import MAX_PART_HEADS
from quire.ops.attention.cpu import CpuBackend, variants, why_not
from quire.ops.attention_inputs import Scores
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.spec.cache_group import equal_parts
from tests.support.cases import pairwise
from tests.support.kernels.latent_cases import (
    LAYER,
    Contents,
    Latents,
    as_fp8,
    as_int8,
    in_steps,
    make_contents,
    softmax_rows,
)
from tests.support.models.paged_forward import CPU, RowPart, make_step

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core was not built")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SHAPES = {
    "usual": Latents(),
    "one_head": Latents(num_heads=1, size=24, num_values=16),
    "all_values": Latents(num_heads=7, size=36, num_values=36, block_size=3),
    "odd_values": Latents(num_heads=16, size=44, num_values=21, block_size=1),
    "parts_of_heads": Latents(num_heads=40, size=72, num_values=64, block_size=256),
    "deepseek": Latents((40, 3), num_heads=16, size=576, num_values=512),
    "deepseek_v3": Latents((20, 1), num_heads=128, size=576, num_values=512),
}
# Tokens of each sequence in each step; the last step has one token of each.
STEPS: list[tuple[int, ...]] = [(1, 30, 7, 0, 3), (7, 0, 4, 0, 69), (1, 1, 1, 1, 1)]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads after the test."""
    yield
    set_num_threads(None)


def steps_of(case: Latents) -> list[tuple[int, ...]]:
    if len(case.lengths) == len(STEPS[0]):
        return STEPS
    return [tuple(length - 1 for length in case.lengths), (1,) * len(case.lengths)]


def compute(
    case: Latents, contents: Contents, steps: Sequence[Sequence[int]], **options: object
) -> list[torch.Tensor]:
    backend = CpuBackend(case.layout(contents.q[0].dtype, CPU), **options)  # type: ignore[arg-type]
    return in_steps(backend, case, contents, steps, CPU)


@pytest.mark.parametrize(
    ("name", "variant", "dtype"), pairwise(list(SHAPES), list(variants()), list(TOLERANCE)), ids=str
)
def test_latent_attention_equals_softmax(name: str, variant: str, dtype: torch.dtype) -> None:
    case = SHAPES[name]
    contents = make_contents(case, dtype)
    found = compute(case, contents, steps_of(case), variant=variant)
    for got, wanted in zip(found, softmax_rows(case, contents), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("name", ["usual", "parts_of_heads", "deepseek"])
def test_int8_attention_equals_softmax_of_stored_values(name: str, variant: str) -> None:
    case = replace(SHAPES[name], kv_format="int8")
    contents = make_contents(case)
    contents.latents[0][0] = 0.0  # the largest magnitude of a vector may be 0
    found = compute(case, contents, steps_of(case), variant=variant)
    stored = Contents(contents.q, [as_int8(x) for x in contents.latents])
    for got, wanted in zip(found, softmax_rows(case, stored), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["usual", "parts_of_heads", "deepseek"])
def test_fp8_attention_equals_softmax_of_stored_values(
    name: str, dtype: torch.dtype, variant: str
) -> None:
    """Values beyond the range saturate; NaN stays NaN."""
    scale = 0.004
    case = replace(SHAPES[name], kv_format="fp8")
    contents = make_contents(case, dtype)
    contents.latents[0][0] *= 1e-3  # subnormal
    stored = Contents(contents.q, [as_fp8(x, scale) for x in contents.latents])
    scales = {LAYER: (scale, 3 * scale)}  # the scale of values is for layers that store values
    found = compute(case, contents, steps_of(case), variant=variant, scales=scales)
    for got, wanted in zip(found, softmax_rows(case, stored), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    contents.latents[0][-1, 3] = torch.nan
    found = compute(case, contents, steps_of(case), variant=variant, scales=scales)
    assert found[0][-1, :, 3].isnan().all() and not found[0][:-1].isnan().any()


@pytest.mark.parametrize("variant", variants())
def test_every_fp8_value_is_read_and_written(variant: str) -> None:
    """One token has all fp8 values but NaN; its result is the token itself."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()]
    between = (numbers[1:] + numbers[:-1]) / 2  # ties
    for values in (numbers, between.repeat(2)[:252]):
        values = torch.nn.functional.pad(values, (0, -len(values) % 4))
        case = Latents((1,), num_heads=1, size=len(values), num_values=len(values), kv_format="fp8")
        contents = Contents([torch.zeros(1, 1, len(values))], [values[None]])
        (got,) = compute(case, contents, [(1,)], variant=variant)
        assert torch.equal(got[0, 0], as_fp8(values, 1.0) + 0.0)


STORED = {
    "float32": ("auto", torch.float32),
    "bfloat16": ("auto", torch.bfloat16),
    "int8": ("int8", torch.float32),
    "fp8": ("fp8", torch.bfloat16),
}


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("stored", STORED)
def test_bits_do_not_depend_on_chunks_blocks_or_threads(
    stored: str, variant: str, threads: None
) -> None:
    kv_format, dtype = STORED[stored]
    case = Latents((600, 300, 31), num_heads=6, kv_format=kv_format)
    contents = make_contents(case, dtype)
    wanted = compute(case, contents, [case.lengths], variant=variant)
    for row, length in enumerate(case.lengths):
        alone = Contents(contents.q[row : row + 1], contents.latents[row : row + 1])
        got = compute(replace(case, lengths=(length,)), alone, [(length,)], variant=variant)
        assert torch.equal(got[0], wanted[row]), f"row {row} alone"
    chunks = [(257, 1, 0), (1, 255, 5), (300, 2, 20), (7, 40, 1), (34, 1, 4), (1, 1, 1)]
    for block_size in (1, 3, 16, 256):
        cut = replace(case, block_size=block_size)
        got = compute(cut, contents, chunks, variant=variant)
        assert all(map(torch.equal, got, wanted)), f"chunks, blocks of {block_size}"
    for count in (1, 2, 3):
        set_num_threads(count)
        got = compute(case, contents, [case.lengths], variant=variant)
        assert all(map(torch.equal, got, wanted)), f"{count} threads"


@pytest.mark.parametrize("variant", variants())
def test_sharing_blocks_does_not_change_bits(variant: str, threads: None) -> None:
    case = Latents((1100, 800, 769), shared=768)
    contents = make_contents(case)
    steps = [(1000, 0, 0), (99, 31, 0), (1, 1, 1)]
    wanted = compute(case, contents, steps, variant=variant, cascade=False, split=False)
    for count in (1, 2, 16):
        set_num_threads(count)
        got = compute(case, contents, steps, variant=variant)
        assert all(map(torch.equal, got, wanted))


def test_nan_reaches_only_later_tokens() -> None:
    case = Latents((400,), num_heads=3)
    contents = make_contents(case, torch.bfloat16)
    (wanted,) = compute(case, contents, [(400,)])
    contents.latents[0][270, 5] = torch.nan
    (got,) = compute(case, contents, [(400,)])
    assert torch.equal(got[:270], wanted[:270])
    assert got[270:, :, 5].isnan().all()


@pytest.mark.parametrize("kv_format", ["auto", "int8", "fp8"])
def test_blocks_can_be_copied_and_swapped(kv_format: str) -> None:
    case = Latents((40,), kv_format=kv_format)
    contents, (table,) = make_contents(case), case.tables()
    backend = CpuBackend(case.layout(torch.float32, CPU))
    (wanted,) = in_steps(backend, case, contents, [(40,)], CPU)
    used = np.array(table, np.int32)
    free = np.array([*{*range(5)} - {*table}][:1], np.int32)
    backend.copy_blocks(0, used[:1], free)
    backend.swap_out(0, used[1:], used[1:])
    backend.write_latent(LAYER, torch.zeros_like(contents.latents[0]))
    backend.load(0, used[1:], used[1:])
    backend.prepare(make_step([RowPart(0, 40, ([*free.tolist(), *table[1:]],))], 16))
    got = backend.run_latent(LAYER, contents.q[0], Scores(case.scale), case.num_values)
    assert torch.equal(got, wanted)


def test_latent_vectors_must_be_multiples_of_4_bytes() -> None:
    layouts = [
        Latents(size=39).layout(torch.bfloat16, CPU),
        Latents(size=38, kv_format="int8").layout(torch.float32, CPU),
    ]
    for layout in layouts:
        assert "multiple of 4 bytes" in (why_not(layout) or "")
    assert why_not(Latents(size=39).layout(torch.float32, CPU)) is None


@pytest.mark.parametrize(
    ("num_heads", "parts"), [(1, 1), (16, 1), (32, 1), (40, 2), (128, 4), (37, 37)]
)
def test_heads_are_cut_into_equal_parts(num_heads: int, parts: int) -> None:
    assert equal_parts(num_heads, MAX_PART_HEADS) == parts
