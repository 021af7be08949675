"""The sizes of packed weights, computed without the core, equal the core's."""

import itertools

import pytest

from quire.base.errors import ConfigError
from quire.ops.host.native import core
from quire.ops.host.native_types import WeightLayout
from quire.ops.weights.formats import (
    CORE_DTYPES,
    FORMATS,
    GROUP_SIZES,
    NAMES,
    SIZES,
    Packing,
    Quantization,
    check_quantization,
    packed_bytes,
    packed_form,
    panel_of,
    variant_numbers,
    variants,
)

SHAPES = [(1, 1), (1, 8), (3, 31), (16, 32), (17, 33), (63, 64), (64, 65), (65, 127)]
SHAPES += [(100, 200), (97, 4097), (257, 1), (1000, 36)]
needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")


@needs_core
@pytest.mark.parametrize("format", NAMES)
@pytest.mark.parametrize("variant", variants())
def test_packed_bytes_equal_the_cores(variant: str, format: str) -> None:
    """Cases are all variants, formats and groups, also with partial panels and groups."""
    module, number = core(), variant_numbers()[variant]
    assert module is not None
    is_quantised, own = format not in CORE_DTYPES, SIZES[format]
    sizes = (*GROUP_SIZES, *([0] if format in ("int8", "fp8") else [])) if is_quantised else (0,)
    shapes = [(outputs, 256 * inputs) for outputs, inputs in SHAPES] if own.block_bytes else SHAPES
    for (outputs, inputs), size in itertools.product(shapes, [own.group] if own.group else sizes):
        chosen = Quantization(format, size) if is_quantised else None
        form = packed_form(chosen) if chosen is not None else None
        name, group = (format, 1) if form is None else (form.format, form.group_of(inputs))
        layout = WeightLayout(NAMES.index(name), number, outputs, inputs, group)
        got = packed_bytes((outputs, inputs), format, chosen, panel_of(variant))
        assert got == module.linear_bytes(layout.at(0, module)), (outputs, inputs, size)


def test_names_begin_with_the_measured_formats() -> None:
    """Each format is multiplied as one of the measured ones."""
    assert NAMES[: len(FORMATS)] == FORMATS
    assert {each.is_measured_as for each in SIZES.values()} <= set(FORMATS)


def test_head_bytes_include_a_tied_table_that_cannot_be_shared() -> None:
    """One weight serves both if rows can be looked up: plain ones, and the core's but int4."""
    int8, int4 = Quantization("int8", 32), Quantization("int4", 32)
    plain, packed = 64 * 32 * 2, Packing("bfloat16", panel=64, is_reordered=True)
    assert Packing("bfloat16").head_bytes((64, 32), None, is_tied=True) == plain
    assert packed.head_bytes((64, 32), None, is_tied=True) == plain
    for format, table in ((int8, 0), (int4, plain)):
        own = packed.weight_bytes((64, 32), format)
        assert packed.head_bytes((64, 32), format, is_tied=False) == own
        assert packed.head_bytes((64, 32), format, is_tied=True) == own + table
        on_gpu = Packing("bfloat16", is_gpu=True)
        own = on_gpu.weight_bytes((64, 32), format)
        assert on_gpu.head_bytes((64, 32), format, is_tied=False) == own
        assert on_gpu.head_bytes((64, 32), format, is_tied=True) == own + table
    assert Packing("bfloat16", is_gpu=True).head_bytes((64, 32), None, is_tied=True) == plain
    reordered = Packing("bfloat16", is_reordered=True)  # oneDNN's
    assert reordered.head_bytes((64, 32), None, is_tied=True) == 2 * plain


def test_too_many_inputs_for_one_scale_are_rejected() -> None:
    with pytest.raises(ConfigError, match="give quantization_group_size 128"):
        packed_bytes((8, 70_000), "bfloat16", Quantization("int8", 0), 64)


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        ("float64", "cuda", "not float64"),
        ("float64", "cpu", "not float64"),
        ("bfloat16", "cuda", "on a GPU needs triton"),
    ],
)
def test_quantisation_without_kernels_is_rejected(
    dtype: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check_quantization(dtype, device)


def test_quantisation_on_a_gpu_is_accepted_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_quantization("bfloat16", "cuda")
