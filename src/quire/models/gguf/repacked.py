"""Turn blocks of GGUF's IQ and TQ formats into blocks that the core packs, without loss.

The core has no kernels for these formats, but it multiplies integers with scales. IQ4_NL becomes
Q8_0 and ternary formats become Q4_0. The others become blocks of a float32 scale and int8 codes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.models.gguf.codebooks import DECODERS, GROUPS, LAYOUTS
from quire.spec.gguf.container import KINDS, TensorKind

Bytes = npt.NDArray[np.uint8]

Q4_0, Q8_0 = KINDS[2], KINDS[8]
WIDE = "int8_f32"  # name of blocks that GGUF lacks: a float32 scale and int8 codes
CHOSEN = {"IQ4_NL": Q8_0, "TQ1_0": Q4_0, "TQ2_0": Q4_0}


def packed_kind(kind: TensorKind) -> TensorKind:
    """Return the blocks in which the core gets a format; the format itself if it has kernels."""
    if kind.name not in DECODERS:
        return kind
    group = GROUPS.get(kind.name, 32)
    return CHOSEN.get(kind.name, TensorKind(WIDE, group, group + 4))


def repacked(kind: TensorKind, rows: Bytes) -> Bytes:
    """Convert rows of blocks, uint8 [rows, bytes], to rows of blocks of `packed_kind`."""
    if kind.name not in DECODERS:
        return rows
    blocks = np.ascontiguousarray(rows).reshape(-1).view(LAYOUTS[kind.name])
    scales, codes = DECODERS[kind.name](blocks)
    target = packed_kind(kind)
    codes = codes.reshape(-1, target.block_size)
    if target is Q4_0:
        low, high = np.split((codes + 8).astype(np.uint8), 2, axis=1)
        codes = low | high << 4
    made: npt.NDArray[Any] = np.empty(len(codes), _layout(target))
    made["d"], made["q"] = scales.reshape(-1), codes
    return made.view(np.uint8).reshape(len(rows), -1)


def _layout(kind: TensorKind) -> np.dtype[Any]:
    scale = "<f4" if kind.name == WIDE else "<f2"
    size = kind.block_bytes - np.dtype(scale).itemsize
    return np.dtype([("d", scale), ("q", "u1" if kind is Q4_0 else "i1", (size,))])
