"""Decode GGUF's IQ and TQ formats to integers and scales, as llama.cpp defines them.

Shape legend: B blocks, G groups of a block, S values of a group. Each function converts an array of
records [B] to float32 scales [B, G] and int8 codes [B, G, S]. A value is scale times code, and both
are exact. So the core can multiply the codes as integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.models.gguf.grids import GRIDS

Records = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Scales = npt.NDArray[np.float32]

NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
# A word of 7 bits is the signs of 8 values; the eighth makes the number of negative ones even.
_WORDS = np.arange(128)
_PARITY = (_WORDS[:, None] >> np.arange(7)).sum(1) & 1
SIGNS = 1 - 2 * ((_WORDS | _PARITY << 7)[:, None] >> np.arange(8) & 1).astype(np.int8)
ANY_SIGNS = 1 - 2 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.int8)

D = ("d", "<f2")
LAYOUTS: dict[str, np.dtype[Any]] = {
    "IQ4_NL": np.dtype([D, ("q", "u1", (16,))]),
    "IQ4_XS": np.dtype([D, ("high", "<u2"), ("low", "u1", (4,)), ("q", "u1", (8, 16))]),
    "IQ3_XXS": np.dtype([D, ("q", "u1", (8, 8)), ("signs", "<u4", (8,))]),
    "IQ3_S": np.dtype(
        [
            D,
            ("q", "u1", (64,)),
            ("high", "u1", (8,)),
            ("signs", "u1", (32,)),
            ("scales", "u1", (4,)),
        ]
    ),
    "IQ2_XXS": np.dtype([D, ("q", [("words", "u1", (4,)), ("signs", "<u4")], (8,))]),
    "IQ2_XS": np.dtype([D, ("q", "<u2", (32,)), ("scales", "u1", (8,))]),
    "IQ2_S": np.dtype(
        [
            D,
            ("q", "u1", (32,)),
            ("signs", "u1", (32,)),
            ("high", "u1", (8,)),
            ("scales", "u1", (8,)),
        ]
    ),
    "IQ1_S": np.dtype([D, ("q", "u1", (32,)), ("high", "<u2", (8,))]),
    "IQ1_M": np.dtype([("q", "u1", (32,)), ("high", "u1", (16,)), ("scales", "<u2", (4,))]),
    "TQ1_0": np.dtype([("q", "u1", (32,)), ("middle", "u1", (16,)), ("last", "u1", (4,)), D]),
    "TQ2_0": np.dtype([("q", "u1", (2, 32)), D]),
}
GROUPS = {"IQ2_XS": 16, "IQ2_S": 16, "IQ1_M": 16}  # values of a group; all others have 32


def _iq4_nl(blocks: Records) -> tuple[Scales, Codes]:
    return _column(blocks["d"]), NON_LINEAR[_halves(blocks["q"][:, None])]


def _iq4_xs(blocks: Records) -> tuple[Scales, Codes]:
    """Decode IQ4_XS. A group's scale has 6 bits: 4 in `low`, 2 in `high`."""
    low = _fields(blocks["low"], 4)
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return _column(blocks["d"]) * scales, NON_LINEAR[_halves(blocks["q"])]


def _iq3_xxs(blocks: Records) -> tuple[Scales, Codes]:
    codes = GRIDS["IQ3_XXS"].vectors[blocks["q"]].reshape(-1, 8, 32)
    scales = _column(blocks["d"]) * (_top_four(blocks["signs"]) + np.float32(0.5))
    return scales * np.float32(0.5), codes * _packed_signs(blocks["signs"])


def _iq3_s(blocks: Records) -> tuple[Scales, Codes]:
    words = blocks["q"] | _fields(blocks["high"], 1).astype(np.uint16) << 8
    codes = GRIDS["IQ3_S"].vectors[words].reshape(-1, 8, 32)
    scales = _column(blocks["d"]) * (1 + 2 * _fields(blocks["scales"], 4))
    return scales, codes * ANY_SIGNS[blocks["signs"]].reshape(codes.shape)


def _iq2_xxs(blocks: Records) -> tuple[Scales, Codes]:
    codes = GRIDS["IQ2_XXS"].vectors[blocks["q"]["words"]].reshape(-1, 8, 32)
    signs = blocks["q"]["signs"]
    scales = _column(blocks["d"]) * (_top_four(signs) + np.float32(0.5))
    return scales * np.float32(0.25), codes * _packed_signs(signs)


def _iq2_xs(blocks: Records) -> tuple[Scales, Codes]:
    codes = GRIDS["IQ2_XS"].vectors[blocks["q"] & 511] * SIGNS[blocks["q"] >> 9]
    return _quarters(blocks), codes.reshape(-1, 16, 16)


def _iq2_s(blocks: Records) -> tuple[Scales, Codes]:
    words = blocks["q"] | _fields(blocks["high"], 2).astype(np.uint16) << 8
    codes = GRIDS["IQ2_S"].vectors[words] * ANY_SIGNS[blocks["signs"]]
    return _quarters(blocks), codes.reshape(-1, 16, 16)


def _iq1_s(blocks: Records) -> tuple[Scales, Codes]:
    high = blocks["high"]
    words = blocks["q"] | ((high[..., None] >> np.arange(0, 12, 3) & 7) << 8).reshape(-1, 32)
    scales = _column(blocks["d"]) * (2 * (high >> 12 & 7) + 1)
    return scales * np.float32(0.125), _shifted(words, np.repeat(high >> 15, 4, axis=1), 32)


def _iq1_m(blocks: Records) -> tuple[Scales, Codes]:
    """Decode IQ1_M. The top 4 bits of its four words of scales are the block's scale."""
    packed, nibbles = blocks["scales"], _fields(blocks["high"], 4)
    parts = (packed >> 12) << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1).astype("<u2").view("<f2")
    scales = (packed[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 16)
    words = blocks["q"] | (nibbles & 7).astype(np.uint16) << 8
    return _column(d) * (2 * scales + 1) * np.float32(0.125), _shifted(words, nibbles >> 3, 16)


def _tq1_0(blocks: Records) -> tuple[Scales, Codes]:
    """Decode TQ1_0. A byte is a fraction of 256 with 5 digits in base 3, the last ones with 4."""
    parts = []
    for name, count in (("q", 5), ("middle", 5), ("last", 4)):
        shifted = blocks[name][:, None] * (3 ** np.arange(count)).astype(np.uint8)[:, None]
        parts.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1))
    return _ternary(blocks, np.concatenate(parts, axis=1))


def _tq2_0(blocks: Records) -> tuple[Scales, Codes]:
    fields = blocks["q"][:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return _ternary(blocks, fields)


DECODERS: dict[str, Callable[[Records], tuple[Scales, Codes]]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}


def _column(halves: Records) -> Scales:
    """Convert float16 [B] to float32 [B, 1]."""
    return halves.astype(np.float32)[:, None]


def _fields(packed: Bytes, bits: int) -> Bytes:
    """Split bytes [B, n] into fields [B, n * 8 / bits], lowest bits first, byte after byte."""
    fields = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return fields.reshape(len(packed), -1)


def _halves(packed: Bytes) -> Bytes:
    """Split bytes [B, G, 16] into 4-bit values [B, G, 32]: the low halves, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _top_four(words: Records) -> Scales:
    return (words >> 28).astype(np.float32)


def _packed_signs(words: Records) -> Codes:
    """Return the signs [B, 8, 32] that the lower 28 bits of words [B, 8] stand for."""
    sevens = words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    signs: Codes = SIGNS[sevens].reshape(len(words), 8, 32)
    return signs


def _quarters(blocks: Records) -> Scales:
    """Return a quarter of each group's scale and a half, [B, 16]."""
    scales = _fields(blocks["scales"], 4) + np.float32(0.5)
    return _column(blocks["d"]) * scales * np.float32(0.25)


def _shifted(words: Records, is_down: Records, size: int) -> Codes:
    """Return eight times the vectors of words [B, 32], each plus or minus 1."""
    shift = 1 - 2 * is_down.astype(np.int8)
    codes = GRIDS["IQ1_S"].vectors[words] * np.int8(8) + shift[..., None]
    return codes.reshape(len(words), -1, size)


def _ternary(blocks: Records, digits: Records) -> tuple[Scales, Codes]:
    codes = digits.astype(np.int8) - np.int8(1)
    return np.repeat(_column(blocks["d"]), 8, axis=1), codes.reshape(-1, 8, 32)
