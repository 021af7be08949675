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
    Wanted,
    group_of,
    groups_of,
    of_outputs,
    scale_shapes,
    unused,
)
from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight


def tensors(how: StoredWeight, shape: Shape) -> dict[str, Wanted]:
    scales, axes = scale_shapes(how, shape), ((OUTPUTS, how.rows), groups_of(how))
    return {
        ".weight": Wanted((shape,), ("I8",), axes=((OUTPUTS, 1), (INPUTS, 1))),
        ".weight_scale": Wanted(scales, SCALES, axes=axes),
        ".weight_zero_point": Wanted(scales, ("I8",), is_needed=how.has_zeros, axes=axes),
        ".input_scale": unused(),
        ".input_zero_point": unused(),
    }


def rows(how: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> IntegerRows:
    zeros = found.get(".weight_zero_point")
    return IntegerRows(
        found[".weight"],
        how.bits,
        of_outputs(found[".weight_scale"], how, shape),
        group_of(how, shape[1]),
        of_outputs(zeros, how, shape) if zeros is not None and zeros.any() else None,
    )
