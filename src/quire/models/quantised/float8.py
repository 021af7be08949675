"""Read e4m3 numbers with scales per tensor, output, group of inputs, or block of both.

    weight                            float8_e4m3fn [N, K]
    weight_scale_inv or weight_scale  [blocks of N, blocks of K], or fewer

weight[n, k] = weight[n, k] * scale of its block, under either name. The shape of the scales
determines the blocks, because a file does not always hold the blocks that its config describes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from quire.models.quantised.tensors import (
    INPUTS,
    OUTPUTS,
    POWERS,
    SCALES,
    Shape,
    TensorLayout,
    group_of,
    groups_of,
    of_outputs,
    powers_of_two,
    scale_shapes,
    unused,
)
from quire.ops.weights.stored_rows import Float8Rows
from quire.spec.quantization_config import StoredWeight

SCALE = ".weight_scale_inv"


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    shapes = (found for scope in _scopes(scheme) for found in scale_shapes(scope, shape))
    return {
        ".weight": TensorLayout((shape,), ("F8_E4M3",), axes=((OUTPUTS, 1), (INPUTS, 1))),
        SCALE: TensorLayout(
            tuple(dict.fromkeys(shapes)),
            (*SCALES, *POWERS),
            (".weight_scale",),
            axes=((OUTPUTS, scheme.rows), groups_of(scheme)),
        ),
        ".activation_scale": unused(),
        ".input_scale": unused(),
        ".input_zero_point": unused(),
        ".input_scale_ub": unused(),
    }


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> Float8Rows:
    scales = found[SCALE]
    stored = tuple(scales.shape)
    scheme = next(scope for scope in _scopes(scheme) if stored in scale_shapes(scope, shape))
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales = powers_of_two(scales)
    return Float8Rows(
        found[".weight"], of_outputs(scales, scheme, shape), group_of(scheme, shape[1])
    )


def _scopes(scheme: StoredWeight) -> tuple[StoredWeight, ...]:
    """Return the possible scopes of scales: as configured, per output, and per tensor."""
    return scheme, replace(scheme, rows=1, group_size=0), replace(scheme, rows=0, group_size=0)
