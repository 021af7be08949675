"""Dequantised GGUF blocks, compared with llama.cpp's Python package."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quire.models.gguf.dequantise import LAYOUTS, dequantise
from quire.spec.gguf.container import KINDS, TensorKind

# Digests of the float32 values that gguf 0.19's quants.dequantize gives for `blocks_of`.
DIGESTS = {
    "F32": "26f149d98b862075",
    "F16": "7fe45039affb75ec",
    "Q4_0": "907c62c287e16a7f",
    "Q4_1": "75c1bd9bf083a383",
    "Q5_0": "bcad30abe682f8ab",
    "Q5_1": "8b9d84db59db1bc9",
    "Q8_0": "c97c890a36ec0445",
    "Q2_K": "fd45156220986279",
    "Q3_K": "f0e049b916a96e19",
    "Q4_K": "259b16fe7698dcec",
    "Q5_K": "60f061c4246fb848",
    "Q6_K": "cf7337482e680298",
    "BF16": "9066754534afec96",
    "MXFP4": "76e92f1d16fbe9db",
    "IQ2_XXS": "4509bbeabcf3d90a",
    "IQ2_XS": "79dbcdaa9d1df289",
    "IQ3_XXS": "34312f0bf7f3e3bd",
    "IQ1_S": "c846f77dbee30024",
    "IQ4_NL": "4c9351137a0a78ee",
    "IQ3_S": "274b6c436dd448d0",
    "IQ2_S": "918d0ec2d887c2f9",
    "IQ4_XS": "7ac1649cd717defa",
    "IQ1_M": "2e89ae05f6de61fa",
    "TQ1_0": "45067017ff1e6c59",
    "TQ2_0": "6a3356014ebbb434",
}


def blocks_of(kind: TensorKind, rows: int = 40) -> npt.NDArray[Any]:
    """Return random bytes with finite, moderate scales."""
    numbers = np.random.default_rng(3)
    columns = 4 if kind.block_size > 1 else 32
    blocks = numbers.integers(0, 256, (rows * columns, kind.block_bytes), dtype=np.uint8)
    layout = LAYOUTS[kind.name]
    if layout.names is None:
        values = numbers.normal(size=len(blocks)).astype(np.float32)
        bits = values.view(np.uint32) >> 16 if kind.name == "BF16" else values
        return bits.astype(layout)[:, None].view(np.uint8).reshape(rows, -1)
    records = blocks.reshape(-1).view(layout)
    for name in [name for name in ("d", "m") if name in layout.names]:
        records[name] = numbers.normal(scale=0.1, size=len(records))
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_values_match_digests_from_llama_cpp(kind: TensorKind) -> None:
    rows = blocks_of(kind)
    values = dequantise(kind, rows)
    assert values.shape == (40, rows.shape[1] // kind.block_bytes * kind.block_size)
    assert values.dtype == np.float32 and values.flags.writeable
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == DIGESTS[kind.name]


@pytest.mark.parametrize("number", KINDS)
def test_values_match_the_gguf_package(number: int) -> None:
    """Takes any bytes, and needs the package (`pip install gguf`)."""
    gguf = pytest.importorskip("gguf")
    kind = KINDS[number]
    rows = np.random.default_rng(4).integers(0, 256, (64, 16 * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
    np.testing.assert_array_equal(dequantise(kind, rows), wanted)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_layouts_have_the_block_size_of_their_kind(kind: TensorKind) -> None:
    assert LAYOUTS[kind.name].itemsize == kind.block_bytes


def test_dequantising_in_parts_gives_the_same_values() -> None:
    kind = KINDS[12]
    rows = blocks_of(kind)
    parts = [dequantise(kind, rows[start : start + 7]) for start in range(0, 40, 7)]
    np.testing.assert_array_equal(np.concatenate(parts), dequantise(kind, rows))
