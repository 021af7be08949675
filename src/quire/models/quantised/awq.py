"""Read weights in AWQ's layout for its `gemm` kernel, as AutoAWQ writes it: 4 bits.

    qweight  int32 [K, N / 8]    8 outputs in a word, in the order of PLACES
    qzeros   int32 [G, N / 8]
    scales   [G, N]

weight[n, k] = scales[g, n] * (qweight[k, n] - qzeros[g, n]).
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
    num_groups,
    signed,
    unpacked,
)
from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight

OF_WORD = 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # index of each output in its word, lowest bits first


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    outputs, inputs = shape
    groups, words = num_groups(scheme, inputs), -(-outputs // OF_WORD)
    return {
        ".qweight": TensorLayout(
            ((inputs, words),), ("I32",), axes=((INPUTS, 1), (OUTPUTS, OF_WORD))
        ),
        ".qzeros": TensorLayout(
            ((groups, words),), ("I32",), axes=(groups_of(scheme), (OUTPUTS, OF_WORD))
        ),
        ".scales": TensorLayout(
            ((groups, outputs),), SCALES, axes=(groups_of(scheme), (OUTPUTS, 1))
        ),
    }


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> IntegerRows:
    outputs, inputs = shape
    numbers_KN = unpacked(found[".qweight"], 4, PLACES)[:, :outputs]
    zeros_GN = signed(unpacked(found[".qzeros"], 4, PLACES)[:, :outputs], 4)
    return IntegerRows(
        signed(numbers_KN.t().contiguous(), 4),
        4,
        found[".scales"].float().t().contiguous(),
        group_of(scheme, inputs),
        zeros_GN.t().float().contiguous() if zeros_GN.any() else None,
    )
