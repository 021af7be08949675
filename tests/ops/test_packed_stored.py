"""Quantised weights of checkpoints keep their values in the core's layout. Products equal float64
products with activations rounded to int8 (not rounded for fp8)."""

from dataclasses import replace

import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.ops.linear import linear
from quire.ops.weights import formats
from quire.ops.weights.device_weights import pack_rows
from quire.ops.weights.formats import Quantization, packed_bytes, panel_of
from quire.ops.weights.pack import pack_stored, packed_view, stored_group
from quire.ops.weights.packed import PackedWeight
from quire.ops.weights.stored_rows import Float4Rows, Float8Rows, IntegerRows, StoredRows
from tests.ops.test_linear import quantised_activations, random
from tests.support.cases import pairwise

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

VARIANTS = formats.variants()
SHAPES = [(1, 8), (33, 48), (70, 131), (257, 96), (20, 1027)]
TOKENS = (1, 2, 3, 4, 6, 7, 13, 121)


def integers(
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    scales: torch.dtype = torch.float16,
    zeros: torch.dtype | None = None,
    ordered: bool = False,
) -> IntegerRows:
    """Return random rows. zeros: dtype of the zero points, which are not whole if float32."""
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(outputs + inputs)
    limit = 1 << (bits - 1)
    values = torch.randint(-limit, limit, shape, dtype=torch.int8, generator=generator)
    groups = -(-inputs // group_size)
    scales_NG = (torch.rand(outputs, groups, generator=generator) + 0.5) / limit / inputs**0.5
    zeros_NG = None
    if zeros is not None:
        zeros_NG = torch.randint(-limit, limit, scales_NG.shape, generator=generator).float()
        zeros_NG += 0.0 if zeros == torch.bfloat16 else 1 / 3
    order = torch.randperm(inputs, generator=generator) if ordered else None
    return IntegerRows(values, bits, scales_NG.to(scales).float(), group_size, zeros_NG, order)


def float8(shape: tuple[int, int], group_size: int) -> Float8Rows:
    """Return rows with every code but NaN, also the smallest."""
    outputs, inputs = shape
    codes = torch.arange(outputs * inputs).mul(37).remainder(256).to(torch.uint8).view(shape)
    codes[(codes & 0x7F) == 0x7F] = 0x08
    groups = -(-inputs // group_size)
    scales = (torch.rand(outputs, groups) + 0.5) / 448 / inputs**0.5
    return Float8Rows(codes.view(torch.float8_e4m3fn), scales, group_size)


def float4(shape: tuple[int, int]) -> Float4Rows:
    outputs, inputs = shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    exponents = torch.randint(118, 126, (outputs, inputs // 32), dtype=torch.uint8)
    return Float4Rows(codes, exponents)


def unpacked(weight: PackedWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.shape[0]), torch.float32)


def check_products(rows: StoredRows, weight: PackedWeight, tolerance: float = 1e-5) -> None:
    """Compare with float64 and activations rounded as by the core; batches must not matter."""
    assert torch.equal(unpacked(weight), rows.dequantised())
    outputs, inputs = rows.shape
    bias, every = random(outputs, seed=2), random(max(TOKENS), inputs)
    exact = every.double()
    if not isinstance(rows, Float8Rows):
        order = rows.order if isinstance(rows, IntegerRows) else None
        in_order = every if order is None else every[:, order]
        rounds_scales = weight.format == "int4"
        rounded = quantised_activations(in_order, weight.layout.group, rounds_scales)
        exact = (
            rounded if order is None else torch.empty_like(rounded).index_copy_(1, order, rounded)
        )
    wanted = exact @ rows.dequantised(torch.float64).T + bias.double()
    alone = torch.cat([linear(x[None], weight, bias) for x in every])
    torch.testing.assert_close(alone.double(), wanted, rtol=tolerance, atol=tolerance)
    for tokens in TOKENS:
        assert torch.equal(linear(every[:tokens], weight, bias), alone[:tokens]), tokens


@pytest.mark.parametrize(("bits", "shape", "variant"), pairwise([4, 8], SHAPES, VARIANTS))
def test_integer_products_equal_float64(bits: int, shape: tuple[int, int], variant: str) -> None:
    for group_size in (32, 64, 128, shape[1]):
        for zeros in (None, torch.bfloat16):
            rows = integers(shape, bits, group_size, zeros=zeros)
            check_products(rows, pack_stored(rows, variant=variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scales_and_zero_points_may_have_any_width(
    scales: torch.dtype, zeros: torch.dtype | None, bits: int, variant: str
) -> None:
    rows = integers((40, 300), bits, 64, scales, zeros)
    weight = pack_stored(rows, variant=variant)
    kind = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}[scales]
    kind = "_f32" if zeros == torch.float32 else kind
    assert weight.format == f"int{bits}{kind}{'' if zeros is None else '_zeros'}"
    check_products(rows, weight)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("inputs", [128, 331])
def test_sorted_inputs_are_gathered(inputs: int, variant: str) -> None:
    for bits, zeros in ((4, None), (4, torch.bfloat16), (8, None)):
        rows = integers((50, inputs), bits, 64, zeros=zeros, ordered=True)
        weight = pack_stored(rows, variant=variant)
        check_products(rows, weight)
        x = random(3, inputs).bfloat16()
        assert torch.equal(linear(x, weight), linear(x.float(), weight).bfloat16())


def test_zero_points_of_only_zeros_are_dropped() -> None:
    rows = integers((40, 96), 4, 32, torch.bfloat16)
    zeros = replace(rows, zeros=torch.zeros_like(rows.scales))
    assert pack_stored(zeros).format == "int4"
    assert torch.equal(pack_stored(zeros).data, pack_stored(rows).data)


@pytest.mark.parametrize(
    ("size", "inputs", "wanted"),
    [
        (32, 512, 32),
        (256, 1024, 128),
        (192, 768, 96),
        (48, 96, 48),
        (1000, 1000, 128),
        (40, 20, 24),
    ],
)
def test_groups_are_split_without_changing_values(size: int, inputs: int, wanted: int) -> None:
    assert stored_group(size, inputs) == wanted
    rows = integers((20, inputs), 4, size, zeros=torch.bfloat16)
    check_products(rows, pack_stored(rows))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [*SHAPES, (20, 5003)])
def test_float8_products_equal_float64(shape: tuple[int, int], variant: str) -> None:
    """Nothing is rounded; the last shape has more inputs than a chunk of a panel."""
    for group_size in (32, 128, shape[1]):
        rows = float8(shape, group_size)
        check_products(rows, pack_stored(rows, variant=variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (70, 320), (20, 1056)])
def test_float4_products_equal_float64(shape: tuple[int, int], variant: str) -> None:
    rows = float4(shape)
    check_products(rows, pack_stored(rows, variant=variant))


def test_float4_scales_are_exact_at_the_ends_of_their_range() -> None:
    codes = torch.full((4, 16), 0x21, dtype=torch.uint8)
    rows = Float4Rows(codes, torch.tensor([[0], [1], [2], [254]], dtype=torch.uint8))
    for variant in VARIANTS:
        weight = pack_stored(rows, variant=variant)
        assert torch.equal(unpacked(weight), rows.dequantised())
        ones = torch.full((1, 32), 1.0)
        wanted = rows.dequantised(torch.float64).sum(1)
        ratio = linear(ones, weight)[0, :3].double() / wanted[:3]
        torch.testing.assert_close(ratio, torch.ones(3, dtype=torch.float64), rtol=2e-2, atol=0)


ROWS = {
    "int4": integers((150, 1100), 4, 128),
    "int4 zeros": integers((150, 1100), 4, 32, zeros=torch.bfloat16),
    "int8 zeros": integers((150, 1100), 8, 1100, zeros=torch.bfloat16),
    "int4 sorted": integers((150, 1100), 4, 128, ordered=True),
    "fp8": float8((150, 1100), 128),
    "fp8 rows": float8((150, 1100), 1100),
    "mxfp4": float4((150, 1088)),
}


@pytest.mark.parametrize("name", ROWS)
def test_number_of_threads_does_not_change_bits(name: str) -> None:
    x, results = random(40, ROWS[name].shape[1]), []
    try:
        for threads in (1, 2, 3):
            set_num_threads(threads)
            weight = pack_stored(ROWS[name])
            results.append((weight.data, linear(x, weight), linear(x[:1], weight)))
    finally:
        set_num_threads(None)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_packed_bytes_are_planned_and_views_restored(name: str) -> None:
    rows = ROWS[name]
    weight = pack_stored(rows)
    quantization = Quantization(weight.format, weight.layout.group)
    order_bytes = 4 * rows.shape[1] if weight.layout.is_ordered else 0
    planned = packed_bytes(rows.shape, "float32", quantization, panel_of(weight.variant))
    assert weight.nbytes == planned + order_bytes
    again = packed_view(weight.data, [list(weight.layout)])
    assert again.layout == weight.layout and torch.equal(unpacked(again), unpacked(weight))
    for wrong in (
        {"group": 20},
        {"group": 256},
        {"format": 99},
        {"is_ordered": 2},
        {"outputs": 400},
    ):
        with pytest.raises(ValueError):
            packed_view(weight.data, [list(weight.layout._replace(**wrong))])


def test_nonfinite_values_and_odd_groups_are_rejected() -> None:
    cpu = torch.device("cpu")
    bad = ROWS["int4"].scales.clone()
    bad[3, 1] = float("inf")
    with pytest.raises(ConfigError, match="scales or zero points that are not finite"):
        pack_rows(replace(ROWS["int4"], scales=bad), torch.float32, cpu)
    values = torch.full((2, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="FP8 weight contains NaN"):
        pack_stored(Float8Rows(values, torch.ones(2, 1), 32))
    exponents = torch.tensor([[255]], dtype=torch.uint8)
    with pytest.raises(ConfigError, match="MXFP4 weight has NaN scales"):
        pack_stored(Float4Rows(torch.zeros(1, 16, dtype=torch.uint8), exponents))
    with pytest.raises(ConfigError, match="groups of 36 inputs cannot be multiplied"):
        pack_stored(integers((4, 72), 4, 36))
    with pytest.raises(ConfigError, match="groups of 36 inputs cannot be multiplied"):
        pack_stored(float8((4, 72), 36))
