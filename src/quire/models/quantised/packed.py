"""Read integers packed in words, as compressed-tensors writes them (`pack-quantized`).

    weight_packed      int32 [N, K * bits / 32]    several inputs in a word
    weight_scale       [N, G], or one number
    weight_zero_point  int32 [N * bits / 32, G]    several outputs in a word; a single one is int8
    weight_shape       [2]                         N and K
    weight_g_idx       int32 [K]                   group of each input, if inputs were sorted

weight[n, k] = weight_scale[n, g] * (weight_packed[n, k] - weight_zero_point[n, g]).
"""

from collections.abc import Mapping

import torch

from quire.base.errors import ModelError
from quire.models.quantised.tensors import (
    INPUTS,
    OUTPUTS,
    SCALES,
    WORD,
    Shape,
    TensorLayout,
    group_of,
    groups_of,
    num_groups,
    of_outputs,
    of_some_inputs,
    scale_shapes,
    signed,
    sorted_by_group,
    unpacked,
    unused,
)
from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    outputs, inputs = shape
    of_word, axes = WORD // scheme.bits, ((OUTPUTS, scheme.rows), groups_of(scheme))
    found = {
        ".weight_packed": TensorLayout(
            ((outputs, -(-inputs // of_word)),), ("I32",), axes=((OUTPUTS, 1), (INPUTS, of_word))
        ),
        ".weight_scale": TensorLayout(scale_shapes(scheme, shape), SCALES, axes=axes),
        ".weight_shape": TensorLayout(((2,),), ("I64", "I32"), is_needed=False),
        ".weight_g_idx": TensorLayout(
            ((inputs,),), ("I32", "I64"), is_needed=False, axes=((INPUTS, 1),)
        ),
        ".input_scale": unused(),
        ".input_zero_point": unused(),
        ".input_global_scale": unused(),
    }
    if scheme.has_zeros and scheme.rows == 1:
        packed = (-(-outputs // of_word), num_groups(scheme, inputs))
        axes = (OUTPUTS, of_word), groups_of(scheme)
        found[".weight_zero_point"] = TensorLayout((packed,), ("I32",), axes=axes)
    elif scheme.has_zeros:
        found[".weight_zero_point"] = TensorLayout(scale_shapes(scheme, shape), ("I8",), axes=axes)
    return found


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> IntegerRows:
    outputs, inputs = shape
    bits, group = scheme.bits, group_of(scheme, inputs)
    if ".weight_shape" in found and found[".weight_shape"].tolist() != list(shape):
        raise ModelError(f"weight_shape is {found['.weight_shape'].tolist()}, not {list(shape)}")
    integers = signed(unpacked(found[".weight_packed"], bits)[:, :inputs].contiguous(), bits)
    num_stored = found[".weight_scale"].shape[-1] if found[".weight_scale"].dim() == 2 else 1
    if num_stored > num_groups(scheme, inputs):
        whole = outputs, num_stored * scheme.group_size
        zeros = _zeros(scheme, whole, found)
        scales_GN = of_outputs(found[".weight_scale"], scheme, whole).t()
        of_inputs = found[".weight_g_idx"]
        return of_some_inputs(
            integers, bits, scales_GN, None if zeros is None else zeros.t(), of_inputs
        )
    order = None
    if ".weight_g_idx" in found and not (found[".weight_g_idx"] < 0).any():
        order, is_even = sorted_by_group(found[".weight_g_idx"], group)
        if not is_even:
            raise ModelError(f"weight_g_idx has groups that are not of {group} inputs each")
    if order is not None:
        integers = integers[:, order].contiguous()
    scales = of_outputs(found[".weight_scale"], scheme, shape)
    return IntegerRows(integers, bits, scales, group, _zeros(scheme, shape, found), order)


def _zeros(
    scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    if not scheme.has_zeros:
        return None
    stored = found[".weight_zero_point"]
    if stored.dtype == torch.int32:
        stored = signed(unpacked(stored.t(), scheme.bits)[:, : shape[0]], scheme.bits).t()
    return of_outputs(stored, scheme, shape).contiguous() if stored.any() else None
