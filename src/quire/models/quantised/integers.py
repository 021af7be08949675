"""Read 8-bit integers as compressed-tensors writes them (`int-quantized`).

    weight             int8 [N, K]
    weight_scale       [N, G], or fewer rows
    weight_zero_point  int8, the shape of the scales

weight[n, k] = weight_scale[n, g] * (weight[n, k] - weight_zero_point[n, g]).
"""

from collections.abc import Mapping

import torch

from quire.models.quantised.tensors import (
    INPUTS,
    OUTPUTS,
    SCALES,
    Shape,
    TensorLayout,
    group_of,
    groups_of,
    of_outputs,
    scale_shapes,
    unused,
)
from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    scales, axes = scale_shapes(scheme, shape), ((OUTPUTS, scheme.rows), groups_of(scheme))
    return {
        ".weight": TensorLayout((shape,), ("I8",), axes=((OUTPUTS, 1), (INPUTS, 1))),
        ".weight_scale": TensorLayout(scales, SCALES, axes=axes),
        ".weight_zero_point": TensorLayout(scales, ("I8",), is_needed=scheme.has_zeros, axes=axes),
        ".input_scale": unused(),
        ".input_zero_point": unused(),
    }


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> IntegerRows:
    zeros = found.get(".weight_zero_point")
    return IntegerRows(
        found[".weight"],
        scheme.bits,
        of_outputs(found[".weight_scale"], scheme, shape),
        group_of(scheme, shape[1]),
        of_outputs(zeros, scheme, shape) if zeros is not None and zeros.any() else None,
    )
