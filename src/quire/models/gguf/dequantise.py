"""Dequantise blocks of GGUF's formats to float32, as llama.cpp defines them.

Shape legend: B blocks. Each format is a numpy record that names the parts of one block. A function
converts an array of records [B] to values [B, block size]. Values are little-endian. A byte of two
4-bit values holds values half a group apart, the first one in the low bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.models.gguf import codebooks
from quire.spec.gguf.container import TensorKind

Records = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

SCALE, MIN = ("d", "<f2"), ("m", "<f2")
# 8 scales and 8 minima of 6 bits each, in 12 bytes.
SCALES_AND_MINIMA = ("scales", "u1", (12,))

LAYOUTS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q4_0": np.dtype([SCALE, ("q", "u1", (16,))]),
    "Q4_1": np.dtype([SCALE, MIN, ("q", "u1", (16,))]),
    "Q5_0": np.dtype([SCALE, ("high", "<u4"), ("q", "u1", (16,))]),
    "Q5_1": np.dtype([SCALE, MIN, ("high", "<u4"), ("q", "u1", (16,))]),
    "Q8_0": np.dtype([SCALE, ("q", "i1", (32,))]),
    "MXFP4": np.dtype([("exponent", "u1"), ("q", "u1", (16,))]),
    "Q2_K": np.dtype([("scales", "u1", (16,)), ("q", "u1", (2, 32)), SCALE, MIN]),
    "Q3_K": np.dtype([("high", "u1", (32,)), ("q", "u1", (2, 32)), ("scales", "u1", (12,)), SCALE]),
    "Q4_K": np.dtype([SCALE, MIN, SCALES_AND_MINIMA, ("q", "u1", (4, 32))]),
    "Q5_K": np.dtype([SCALE, MIN, SCALES_AND_MINIMA, ("high", "u1", (32,)), ("q", "u1", (4, 32))]),
    "Q6_K": np.dtype(
        [("q", "u1", (2, 64)), ("high", "u1", (2, 32)), ("scales", "i1", (16,)), SCALE]
    ),
    **codebooks.LAYOUTS,
}


def dequantise(kind: TensorKind, rows: Bytes) -> Values:
    """Convert [rows, bytes of a row] to new float32 [rows, values of a row]."""
    layout = LAYOUTS[kind.name]
    blocks = np.ascontiguousarray(rows).reshape(-1).view(layout)
    with np.errstate(all="ignore"):  # a damaged scale gives inf or nan, as anywhere else
        if kind.name in codebooks.DECODERS:
            scales, codes = codebooks.DECODERS[kind.name](blocks)
            values = codes.astype(np.float32)
            values *= scales[..., None]
            return values.reshape(len(rows), -1)
        return FORMATS[kind.name](blocks).reshape(len(rows), -1)


def _f32(blocks: Records) -> Values:
    return blocks.astype(np.float32)


def _bf16(blocks: Records) -> Values:
    return (blocks.astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Records) -> Values:
    return _scaled(_nibbles(blocks["q"], 16).view(np.int8) - np.int8(8), blocks["d"])


def _q4_1(blocks: Records) -> Values:
    return _scaled(_nibbles(blocks["q"], 16), blocks["d"]) + _column(blocks["m"])


def _q5_0(blocks: Records) -> Values:
    return _scaled(_five_bits(blocks).view(np.int8) - np.int8(16), blocks["d"])


def _q5_1(blocks: Records) -> Values:
    return _scaled(_five_bits(blocks), blocks["d"]) + _column(blocks["m"])


def _q8_0(blocks: Records) -> Values:
    return _scaled(blocks["q"], blocks["d"])


def _mxfp4(blocks: Records) -> Values:
    """Dequantise e2m1 numbers, doubled in the table, with one power of two per block."""
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    table = np.concatenate((doubled, 0 - doubled))  # +0 instead of -0, as in llama.cpp
    scale = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    return table[_nibbles(blocks["q"], 16)] * scale[:, None]


def _q2_k(blocks: Records) -> Values:
    scales, minima = blocks["scales"] & 15, blocks["scales"] >> 4
    q = _fields(blocks["q"], 2).reshape(-1, 16, 16)
    return _scaled_groups(q, blocks, scales, minima)


def _q3_k(blocks: Records) -> Values:
    """Dequantise Q3_K. Its third bit is stored inverted: a 0 subtracts 4."""
    packed = blocks["scales"]
    low = _fields(packed[:, None, :8], 4).reshape(-1, 16)
    high = _fields(packed[:, None, 8:], 2).reshape(-1, 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    third = _fields(blocks["high"][:, None], 1).reshape(-1, 256)
    q = (_fields(blocks["q"], 2).reshape(-1, 256) | third << 2).view(np.int8) - np.int8(4)
    return _scaled_groups(q.reshape(-1, 16, 16), blocks, scales)


def _q4_k(blocks: Records) -> Values:
    q = _fields(blocks["q"], 4).reshape(-1, 8, 32)
    return _scaled_groups(q, blocks, *_scales_and_minima(blocks["scales"]))


def _q5_k(blocks: Records) -> Values:
    q = _fields(blocks["q"], 4).reshape(-1, 8, 32)
    q |= _fields(blocks["high"][:, None], 1).reshape(-1, 8, 32) << 4
    return _scaled_groups(q, blocks, *_scales_and_minima(blocks["scales"]))


def _q6_k(blocks: Records) -> Values:
    q = _fields(blocks["q"], 4).reshape(-1, 256)
    q |= _fields(blocks["high"], 2).reshape(-1, 256) << 4
    groups = (q.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    return _scaled_groups(groups, blocks, blocks["scales"])


FORMATS: dict[str, Callable[[Records], Values]] = {
    "F32": _f32,
    "F16": _f32,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _column(halves: Records) -> Values:
    """Convert float16 [B] to float32 [B, 1]."""
    return halves.astype(np.float32)[:, None]


def _scaled(q: Records, scales: Records) -> Values:
    values = q.astype(np.float32)
    values *= _column(scales)
    return values


def _scaled_groups(
    q: Records, blocks: Records, scales: Records, minima: Records | None = None
) -> Values:
    """Multiply q [B, groups, values of a group] by group scales, and subtract group minima."""
    values = q.astype(np.float32)
    values *= (_column(blocks["d"]) * scales)[..., None]
    if minima is not None:
        values -= (_column(blocks["m"]) * minima)[..., None]
    return values


def _nibbles(packed: Bytes, count: int) -> Bytes:
    """Split bytes [B, count] into 4-bit values [B, 2 * count]: all low halves, then all high."""
    q = np.empty((len(packed), 2 * count), np.uint8)
    np.bitwise_and(packed, 15, out=q[:, :count])
    np.right_shift(packed, 4, out=q[:, count:])
    return q


def _fields(packed: Bytes, bits: int) -> Bytes:
    """Split bytes [B, parts, n] into fields [B, parts, 8 / bits, n], lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = packed[:, :, None] >> shifts
    fields &= np.uint8((1 << bits) - 1)
    return fields


def _five_bits(blocks: Records) -> Bytes:
    """Return the 5-bit values of blocks, [B, 32]; one integer per block holds the fifth bits."""
    fifth = (blocks["high"][:, None] >> np.arange(32, dtype=np.uint32)).astype(np.uint8)
    q = _nibbles(blocks["q"], 16)
    q |= (fifth & 1) << 4
    return q


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack bytes [B, 12] to scales and minima, [B, 8] each. Bytes 0-3 and 4-7 hold all 6 bits of
    the first four. Bytes 8-11 hold 4 bits of the last four; the top bits of 0-7 hold the rest."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, low & 15 | (first >> 6) << 4), axis=1)
    minima = np.concatenate((second & 63, low >> 4 | (second >> 6) << 4), axis=1)
    return scales, minima
