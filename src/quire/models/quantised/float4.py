"""Read MXFP4: e2m1 numbers in blocks of 32 inputs, with a power of two per block.

    NAME_blocks  uint8 [N, K / 32, 16]    two inputs in a byte, the first in its low half
    NAME_scales  uint8 [N, K / 32]        exponents plus 127

gpt-oss uses these names, with all experts in one tensor. compressed-tensors
(`mxfp4-pack-quantized`) uses weight_packed [N, K / 2] and weight_scale.
"""

from collections.abc import Mapping

import torch

from quire.models.quantised.tensors import (
    INPUTS,
    NEITHER,
    OUTPUTS,
    POWERS,
    Shape,
    TensorLayout,
    unused,
)
from quire.ops.weights.stored_rows import FLOAT4_BLOCK, Float4Rows
from quire.spec.quantization_config import StoredWeight

BYTES = FLOAT4_BLOCK // 2
AXES = (OUTPUTS, 1), (INPUTS, FLOAT4_BLOCK)  # axes of scales; experts are cut one at a time


def block_tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    *front, inputs = shape
    blocks = -(-inputs // FLOAT4_BLOCK)
    return {
        "_blocks": TensorLayout(((*front, blocks, BYTES),), ("U8",), axes=(*AXES, (NEITHER, 1))),
        "_scales": TensorLayout(((*front, blocks),), POWERS, axes=AXES),
    }


def block_rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> Float4Rows:
    return Float4Rows(found["_blocks"].flatten(1), found["_scales"].view(torch.uint8))


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    outputs, inputs = shape
    return {
        ".weight_packed": TensorLayout(
            ((outputs, inputs // 2),), ("U8",), axes=((OUTPUTS, 1), (INPUTS, 2))
        ),
        ".weight_scale": TensorLayout(((outputs, -(-inputs // FLOAT4_BLOCK)),), POWERS, axes=AXES),
        ".input_scale": unused(),
        ".input_global_scale": unused(),
    }


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> Float4Rows:
    return Float4Rows(found[".weight_packed"], found[".weight_scale"].view(torch.uint8))
