"""Describe the tensors of a quantised module, and unpack 4-bit and 8-bit numbers from words.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

import math
from dataclasses import dataclass

import torch

from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight

Shape = tuple[int, ...]

# Names of dtypes in safetensors.
SCALES = ("F32", "F16", "BF16")
POWERS = ("U8", "F8_E8M0")
WORD = 32
OUTPUTS, INPUTS, NEITHER = 0, 1, 2  # axis of the module that a dimension of a tensor divides
EXPONENT_BIAS = 127


@dataclass(frozen=True)
class TensorLayout:
    """The description of one tensor of a quantised module."""

    shapes: tuple[Shape, ...]  # permitted shapes
    dtypes: tuple[str, ...]  # permitted dtypes
    other_names: tuple[str, ...] = ()  # alternative suffixes of its name
    is_needed: bool = True  # whether a checkpoint must have it
    is_used: bool = True  # whether weights depend on it
    # For each dimension: the module's axis (OUTPUTS, INPUTS), and the number of its elements per
    # index. The number applies unless each element has an index or all share one.
    axes: tuple[tuple[int, int], ...] = ()


def groups_of(scheme: StoredWeight) -> tuple[int, int]:
    """Return the entry of `TensorLayout.axes` for a dimension that counts groups of inputs.
    Sorted inputs have no fixed group, so their dimension has no axis."""
    return (NEITHER, 1) if scheme.sorts_inputs else (INPUTS, scheme.group_size)


def unused(*shapes: Shape) -> TensorLayout:
    """Describe an optional tensor that no weight depends on, of any shape if none is given."""
    return TensorLayout(shapes, (), is_needed=False, is_used=False)


def num_groups(scheme: StoredWeight, inputs: int) -> int:
    return math.ceil(inputs / scheme.group_size) if scheme.group_size else 1


def scale_shapes(scheme: StoredWeight, shape: Shape) -> tuple[Shape, ...]:
    """Return the permitted shapes of scales: [outputs, groups], also without dimensions of 1."""
    outputs = math.ceil(shape[0] / scheme.rows) if scheme.rows else 1
    groups = num_groups(scheme, shape[1])
    found: list[Shape] = [(outputs, groups)]
    if groups == 1:
        found.append((outputs,))
    return (*found, ()) if groups == outputs == 1 else tuple(found)


def of_outputs(values: torch.Tensor, scheme: StoredWeight, shape: Shape) -> torch.Tensor:
    """Return scales or zero points as float32 [N, G], repeated for outputs that share one."""
    groups = num_groups(scheme, shape[1])
    values = values.float().reshape(-1, groups)
    if scheme.rows == 1:
        return values
    return values.repeat_interleave(scheme.rows or shape[0], dim=0)[: shape[0]].contiguous()


def group_of(scheme: StoredWeight, inputs: int) -> int:
    """Return the number of inputs that share a scale; all inputs without groups."""
    return min(scheme.group_size or inputs, inputs)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return e8m0 exponents of any shape, such as [N, G], as float32 powers of two."""
    return torch.exp2(exponents.view(torch.uint8).float() - EXPONENT_BIAS)


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unpack int32 words [R, C] to uint8 [R, C * 32 / bits], lowest bits of a word first. order:
    for each number of the result, its index in the word; None keeps the order."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(1)
    if order is None:
        return parts
    return parts.view(len(parts), -1, len(order))[..., list(order)].flatten(1)


def signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Convert uint8 numbers of any shape, such as [N, K], to int8: subtract 2 ** (bits - 1)."""
    return (numbers ^ 0x80).view(torch.int8) if bits == 8 else numbers.view(torch.int8) - 8


def of_some_inputs(
    integers_NK: torch.Tensor,
    bits: int,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor | None,
    groups_K: torch.Tensor,
) -> IntegerRows:
    """Return the rows for a part of sorted inputs, with one scale and zero point per input.
    integers: [N, K]. scales, zeros: [G, N]. groups: group of each input, [K]."""
    groups_K = groups_K.long()
    zeros_NK = None if zeros_GN is None else zeros_GN[groups_K].float().t()
    return IntegerRows(integers_NK, bits, scales_GN[groups_K].float().t(), 1, zeros_NK)


def sorted_by_group(groups_K: torch.Tensor, group_size: int) -> tuple[torch.Tensor | None, bool]:
    """Return the permutation that sorts inputs by group, or None if they are sorted, and whether
    all groups but the last then have `group_size` inputs. groups: group of each input, [K]."""
    inputs = len(groups_K)
    expected_groups = torch.arange(inputs) // group_size
    groups_K = groups_K.long() - groups_K.min()  # a rank's first group may be a later one
    if torch.equal(groups_K, expected_groups) or not groups_K.any():  # all zero: never sorted
        return None, True
    order = groups_K.argsort(stable=True)
    return order, torch.equal(groups_K[order], expected_groups)
