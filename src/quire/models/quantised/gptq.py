"""Read weights in GPTQ's layout, as AutoGPTQ and GPTQModel write it.

    qweight  int32 [K * bits / 32, N]    several inputs in a word
    qzeros   int32 [G, N * bits / 32]    several outputs in a word; version 1 subtracts 1 from each
    scales   [G, N]
    g_idx    int32 [K]                   group of each input; desc_act sorts inputs before grouping

weight[n, k] = scales[g, n] * (qweight[k, n] - qzeros[g, n]), where g is the group of k.
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
    of_some_inputs,
    signed,
    sorted_by_group,
    unpacked,
)
from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight

ONES = {4: 0x11111111, 8: 0x01010101}


def tensors(scheme: StoredWeight, shape: Shape) -> dict[str, TensorLayout]:
    outputs, inputs = shape
    groups, of_word = num_groups(scheme, inputs), WORD // scheme.bits
    return {
        ".qweight": TensorLayout(
            ((-(-inputs // of_word), outputs),), ("I32",), axes=((INPUTS, of_word), (OUTPUTS, 1))
        ),
        ".qzeros": TensorLayout(
            ((groups, -(-outputs // of_word)),),
            ("I32",),
            axes=(groups_of(scheme), (OUTPUTS, of_word)),
        ),
        ".scales": TensorLayout(
            ((groups, outputs),), SCALES, axes=(groups_of(scheme), (OUTPUTS, 1))
        ),
        ".g_idx": TensorLayout(((inputs,),), ("I32", "I64"), is_needed=False, axes=((INPUTS, 1),)),
    }


def rows(scheme: StoredWeight, shape: Shape, found: Mapping[str, torch.Tensor]) -> IntegerRows:
    outputs, inputs = shape
    bits, group = scheme.bits, group_of(scheme, inputs)
    integers = signed(unpacked(found[".qweight"].t(), bits)[:, :inputs], bits)
    words = found[".qzeros"]
    if scheme.zero_offset:  # add to whole words with carries, as GPTQ subtracted
        words = (words.long() + ONES[bits] * scheme.zero_offset).to(torch.int32)
    zeros_GN = signed(unpacked(words, bits)[:, :outputs], bits)
    scales_GN = found[".scales"]
    if len(scales_GN) > num_groups(scheme, inputs):
        return of_some_inputs(integers, bits, scales_GN, zeros_GN, found[".g_idx"])
    order = None
    if ".g_idx" in found:
        order, is_even = sorted_by_group(found[".g_idx"], group)
        if not is_even:
            raise ModelError(f"g_idx has groups that are not of {group} inputs each")
    return IntegerRows(
        integers.contiguous() if order is None else integers[:, order],
        bits,
        scales_GN.float().t().contiguous(),
        group,
        zeros_GN.t().float().contiguous() if zeros_GN.any() else None,
        order,
    )
