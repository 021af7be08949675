"""Compare the core's linear layers, in every variant that runs here, with float64.

A row's result must not depend on other rows of the batch, nor on the number of threads.
"""

from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError
from quire.ops.host.native import core
from quire.ops.host.threads import set_num_threads
from quire.ops.linear import linear
from quire.ops.weights import formats
from quire.ops.weights.device_weights import pack_weight, packed_weight_bytes
from quire.ops.weights.formats import VARIANT, Quantization, packed_form
from quire.ops.weights.pack import pack
from quire.ops.weights.packed import PackedWeight
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import IntegerRows
from tests.support.cases import in_turn, pairwise
from tests.support.kernels.kernel_speeds import keep_figures, own_figures

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

VARIANTS = formats.variants()
CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZATIONS = [Quantization("int8", size) for size in (0, 32, 64, 128)]
QUANTIZATIONS += [Quantization("int4", size) for size in (32, 64, 128)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# No multiples of panels or steps; small ones, and larger than a chunk of K.
SHAPES = [(1, 1), (3, 5), (33, 48), (70, 131), (257, 96), (64, 2050), (20, 1027)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def stored(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the whole weight, with its values after packing."""
    return weight.rows(torch.arange(weight.shape[0]), dtype)


def groups_of(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [rows, groups, size] in float64, padded with zeros."""
    padding = -x.shape[1] % size
    return torch.nn.functional.pad(x.double(), (0, padding)).unflatten(1, (-1, size))


def quantised_activations(x: torch.Tensor, size: int, rounds_scales: bool) -> torch.Tensor:
    """Return the values of int8 activations. They are rounded in float32, as in the core.

    rounds_scales: scales are rounded up to one bit of mantissa, as for int4 weights.
    """
    grouped = groups_of(x, size).float()
    largest = grouped.abs().amax(-1, keepdim=True)
    scales, inverse = largest.div(127.0), torch.full_like(largest, 127.0).div(largest)
    if rounds_scales:
        mantissas, exponents = torch.frexp(scales)  # from 0.5 on, below 1
        scales = torch.ldexp((mantissas * 4).ceil() / 4, exponents)
        inverse = 1 / scales
    integers = (grouped * inverse).nan_to_num().round()
    assert (integers.abs() <= 127).all()
    return (integers.double() * scales.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float_products_equal_float64(
    shape: tuple[int, int], variant: str, dtype: torch.dtype
) -> None:
    outputs, inputs = shape
    weight = random(*shape, dtype=dtype, seed=1) * inputs**-0.5
    bias = random(outputs, dtype=dtype, seed=2)
    opaque = pack(weight, None, variant)
    assert torch.equal(stored(opaque, dtype), weight)
    for tokens in (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 130):
        x = random(tokens, inputs, dtype=dtype)
        for offset in (None, bias):
            got = linear(x, opaque, offset)
            assert got.dtype == dtype
            wanted = x.double() @ weight.double().T
            if offset is not None:
                wanted += offset.double()
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(70, 131), (128, 96), (130, 4100)])
def test_sums_have_the_same_bits_wherever_they_are_stored(
    shape: tuple[int, int], variant: str
) -> None:
    """Between chunks of K, float32 results hold the sums of whole panels. Sums of other results
    and of partial panels have separate memory."""
    opaque = pack(random(*shape, dtype=torch.bfloat16, seed=1), None, variant)
    for tokens in (1, 16, 130):
        x = random(tokens, shape[1], dtype=torch.bfloat16)
        whole = linear(x.float(), opaque)
        assert torch.equal(whole.bfloat16(), linear(x, opaque))
        assert torch.equal(whole, linear(x.float(), opaque, torch.zeros(shape[0])))


@pytest.mark.parametrize(
    ("shape", "quantization", "variant", "dtype"),
    pairwise(SHAPES, QUANTIZATIONS, VARIANTS, FLOATS),
    ids=str,
)
def test_quantised_products_equal_float64(
    shape: tuple[int, int], quantization: Quantization, variant: str, dtype: torch.dtype
) -> None:
    """Products are exact; groups are added in float32."""
    outputs, inputs = shape
    weight = random(*shape, dtype=dtype, seed=1) * inputs**-0.5
    bias = random(outputs, dtype=dtype, seed=2)
    opaque = pack(weight, quantization, variant)
    size = packed_form(quantization).group_of(inputs)
    values = stored(opaque).double()
    for tokens in (0, 1, 2, 3, 4, 6, 7, 8, 13, 130):
        x = random(tokens, inputs, dtype=dtype)
        rounded = quantised_activations(x, size, rounds_scales=quantization.format == "int4")
        wanted = rounded @ values.T + bias.double()
        got = linear(x, opaque, bias)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_weights_are_rounded_to_the_nearest(quantization: Quantization) -> None:
    weight = random(40, 300, seed=1)
    levels = 127 if quantization.format == "int8" else 7
    size = quantization.group_of(300)
    exact = groups_of(weight, size)
    got = groups_of(stored(pack(weight, quantization)), size)
    largest = exact.abs().amax(-1, keepdim=True)
    error = (got - exact).abs()
    if quantization.format == "int8":
        assert (error <= largest / levels * 0.505).all()
    plain = (exact / (largest / levels)).round() * largest / levels - exact
    assert got.sub(exact).square().mean() <= plain.square().mean() * 1.06
    assert error.square().mean().sqrt() < {127: 0.01, 7: 0.12}[levels]


@pytest.mark.parametrize(("size", "share"), [(32, 0.85), (64, 0.95)])
def test_searched_int4_scales_reduce_the_error(size: int, share: float) -> None:
    """Each group has an outlier: clipping it costs less than coarse steps for the other values."""
    weight = random(64, 512, seed=1) * 0.1
    weight[:, ::size] *= 5
    exact = groups_of(weight, size)
    scale = exact.abs().amax(-1, keepdim=True) / 7
    plain = ((exact / scale).round() * scale - exact).square().mean()
    got = groups_of(stored(pack(weight, Quantization("int4", size))), size)
    assert (got - exact).square().mean() < share * plain


def test_scales_of_four_int4_groups_are_multiples_of_a_common_scale() -> None:
    """Factors are 1 to 8. The error is a fifth less than with separate scales without a search."""
    weight = random(48, 256, seed=1) * torch.tensor([1.0, 0.3, 2.0, 0.5]).repeat_interleave(64)
    rows = quantised(weight, Quantization("int4", 32))
    assert isinstance(rows, IntegerRows)
    scales = rows.scales.double().abs().unflatten(1, (-1, 4))
    for four in scales.flatten(0, 1):
        ones = [four[0] / multiple for multiple in range(1, 9)]
        assert any(set((four / one).tolist()) <= set(range(1, 9)) for one in ones)
    assert set(rows.integers.unique().tolist()) == set(range(-8, 8))
    exact = groups_of(weight, 32)
    scale = exact.abs().amax(-1, keepdim=True) / 7
    plain = ((exact / scale).round() * scale - exact).square().mean()
    assert (groups_of(rows.dequantised(), 32) - exact).square().mean() < 0.8 * plain


@pytest.mark.parametrize(
    ("quantization", "variant", "dtype"),
    in_turn([None, *QUANTIZATIONS], VARIANTS, FLOATS),
    ids=str,
)
def test_row_has_the_same_bits_in_any_batch(
    quantization: Quantization | None, variant: str, dtype: torch.dtype
) -> None:
    weight = pack(random(150, 1100, dtype=dtype, seed=1) / 32, quantization, variant)
    x = random(300, 1100, dtype=dtype)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(300)])
    for tokens in (*range(1, 18), 119, 120, 121, 240, 300):
        assert torch.equal(linear(x[:tokens], weight), alone[:tokens]), tokens
        assert torch.equal(linear(x[-tokens:], weight), alone[-tokens:]), tokens
    assert torch.equal(linear(x.flip(0), weight), alone.flip(0))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    in_turn([None, *QUANTIZATIONS], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_number_of_threads_does_not_change_bits(
    quantization: Quantization | None, dtype: torch.dtype
) -> None:
    """Threads also share the rows of a panel, as there are fewer panels than threads."""
    weight, x = random(700, 520, dtype=dtype, seed=1), random(220, 520, dtype=dtype)
    bias = random(700, dtype=dtype, seed=2)
    results = []
    try:
        for threads in (1, 2, 3, 5, 31):
            set_num_threads(threads)
            opaque = pack(weight, quantization)
            products = [linear(x[:rows], opaque, bias) for rows in (1, 40, 127, 128, 220)]
            results.append((opaque.data, linear(x, opaque), *products))
    finally:
        set_num_threads(None)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
def test_quantised_products_are_the_same_in_all_variants(quantization: Quantization) -> None:
    """Only the last addition in float32 may differ, as it may be fused."""
    weight, x = random(100, 600, seed=1), random(9, 600)
    results = [linear(x, pack(weight, quantization, variant)) for variant in VARIANTS]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_integers_do_not_overflow(variant: str) -> None:
    """All operands at their largest, of either sign: sums of 16 bits would saturate."""
    inputs = 4096
    signs = torch.where(random(2, inputs) < 0, -1.0, 1.0)
    weight = torch.stack([torch.ones(inputs), -torch.ones(inputs), signs[0]])
    x = torch.stack([torch.ones(inputs), -torch.ones(inputs), signs[0], signs[1]])
    for quantization in QUANTIZATIONS:
        opaque = pack(weight, quantization, variant)
        torch.testing.assert_close(stored(opaque), weight, rtol=1e-2, atol=0)
        torch.testing.assert_close(linear(x, opaque), x @ stored(opaque).T, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize(
    "quantization", [None, Quantization("int8", 32), Quantization("int4", 32)], ids=str
)
def test_nonfinite_inputs_affect_only_their_row(
    quantization: Quantization | None, rows: int, variant: str
) -> None:
    weight = pack(random(40, 64, seed=1), quantization, variant)
    x = random(rows, 64)
    clean = linear(x, weight)
    x[1, 3], x[2, 5], x[3] = float("nan"), float("inf"), 0.0
    got = linear(x, weight)
    others = [row for row in range(rows) if row not in (1, 2, 3)]
    assert torch.equal(got[others], clean[others])
    assert not got[1].isfinite().any() and not got[2].isfinite().any()
    assert torch.equal(got[3], torch.zeros(40))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_activations_of_any_size_keep_their_precision(format: str, variant: str) -> None:
    """Sizes range from nearly subnormal scales to nearly overflowing products."""
    weight = pack(random(40, 64, seed=1), Quantization(format, 32), variant)
    x = random(9, 64)
    ordinary = linear(x, weight)
    for exponent in (-95, -40, 0, 60, 120):
        factor = 2.0**exponent
        assert torch.equal(linear(x * factor, weight), ordinary * factor), exponent
    assert torch.equal(linear(x * 1e-38, weight), torch.zeros(9, 40))


def test_scales_of_activations_are_rounded_up_for_int4_weights() -> None:
    """They become a power of two or 1.5 times one. int8 weights keep the best scale."""
    weight = torch.eye(32)
    for largest, step in [(127.0, 1.0), (127.5, 1.5), (190.5, 1.5), (191.0, 2.0), (63.5, 0.5)]:
        x = torch.full((7, 32), step)
        x[:, 0], x[:, 1] = largest, step / 2 * 0.99
        for size in (32, 64):
            opaque = pack(weight * 7, Quantization("int4", size))
            own = stored(opaque).diagonal()
            torch.testing.assert_close(
                own, torch.full((32,), 7.0), rtol=0.01 * (size == 32), atol=0
            )
            seven = linear(x, opaque)
            assert torch.equal(seven[:, 2:], x[:, 2:] * own[2:]) and not seven[:, 1].any()
    x = torch.zeros(7, 32).index_fill_(1, torch.tensor([0]), 127.5)
    x[:, 1] = 1.01 * 127.5 / 127
    exact = linear(x, pack(weight * 127, Quantization("int8", 32))) / 127
    torch.testing.assert_close(exact[:, :2], x[:, :2], rtol=0.011, atol=0)


def test_rows_need_not_be_contiguous() -> None:
    weight, x = random(30, 48, seed=1), random(5, 96)
    opaque = pack(weight, None)
    assert torch.equal(linear(x[:, :48], opaque), linear(x[:, :48].contiguous(), opaque))
    assert torch.equal(linear(x[:, ::2], opaque), linear(x[:, ::2].contiguous(), opaque))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantization", [None, *QUANTIZATIONS], ids=str)
def test_packed_bytes_are_known_before_packing(
    dtype: torch.dtype, quantization: Quantization | None
) -> None:
    opaque = pack_weight(random(100, 200, dtype=dtype), quantization)
    assert isinstance(opaque, PackedWeight) and opaque.shape == (100, 200)
    assert opaque.nbytes == packed_weight_bytes((100, 200), dtype, CPU, quantization)


def test_environment_can_force_a_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(3, 8)
    with own_figures(tmp_path):
        keep_figures({})  # all equal
        assert pack(weight, None).variant == VARIANTS[-1]
        monkeypatch.setenv(VARIANT, VARIANTS[0])
        assert pack(weight, None).variant == VARIANTS[0] == "portable"
        monkeypatch.setenv(VARIANT, "avx1024")
        with pytest.raises(ConfigError, match="QUIRE_CPU_VARIANT=avx1024 .*portable"):
            pack(weight, None)


def test_unsupported_quantisation_is_rejected() -> None:
    weight = random(4, 8)
    int8 = Quantization("int8", 32)
    with pytest.raises(ConfigError, match="CPUs and NVIDIA GPUs, not on meta"):
        pack_weight(weight.to("meta"), int8)
    with pytest.raises(ConfigError, match="not float64"):
        pack_weight(weight.double(), int8)
    weight[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="not finite"):
        pack_weight(weight, int8)
    with pytest.raises(ConfigError, match="70,000 inputs.*quantization_group_size"):
        Quantization("int8", 0).group_of(70_000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_portable_conversions_keep_every_16_bit_value(dtype: torch.dtype) -> None:
    """Values include subnormals, infinities and NaN."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    got = linear(every[:, None], pack(one, None, "portable"))[:, 0]
    same = (got == every) | (got.isnan() & every.isnan())
    assert same.all(), every[~same][:9]
