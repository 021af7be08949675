"""What the ways of storing a weight have in common: which tensors there are, and how numbers of 4
or 8 bits stand in words.

Shape legend: N outputs, K inputs, G groups of inputs.
"""

import math
from dataclasses import dataclass

import torch

from quire.ops.weights.stored_rows import IntegerRows
from quire.spec.quantization_config import StoredWeight

Shape = tuple[int, ...]

# As safetensors names them.
SCALES = ("F32", "F16", "BF16")
POWERS = ("U8", "F8_E8M0")
WORD = 32
OUTPUTS, INPUTS, NEITHER = 0, 1, 2  # what a dimension counts
EXPONENT_BIAS = 127


@dataclass(frozen=True)
class Wanted:
    """A tensor of a quantised module. shapes, dtypes: those that it may have. other_names: ends of
    its name that others write. is_needed: whether there must be one. is_used: no weight depends on
    others. axes: of each dimension what it counts, outputs or inputs of the module, and how many of
    these one place stands for, if not each has one or all share it."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    other_names: tuple[str, ...] = ()
    is_needed: bool = True
    is_used: bool = True
    axes: tuple[tuple[int, int], ...] = ()


def groups_of(how: StoredWeight) -> tuple[int, int]:
    """Return the axis of a dimension that counts groups of inputs; where inputs were sorted, any of
    them may be in any."""
    return (NEITHER, 1) if how.sorts_inputs else (INPUTS, how.group_size)


def unused(*shapes: Shape) -> Wanted:
    """A tensor that may be there, such as a scale of activations; of any shape if none is given."""
    return Wanted(shapes, (), is_needed=False, is_used=False)


def num_groups(how: StoredWeight, inputs: int) -> int:
    return math.ceil(inputs / how.group_size) if how.group_size else 1


def scale_shapes(how: StoredWeight, shape: Shape) -> tuple[Shape, ...]:
    """Return the shapes that scales may have: [outputs, groups], without what is one."""
    outputs = math.ceil(shape[0] / how.rows) if how.rows else 1
    groups = num_groups(how, shape[1])
    found: list[Shape] = [(outputs, groups)]
    if groups == 1:
        found.append((outputs,))
    return (*found, ()) if groups == outputs == 1 else tuple(found)


def of_outputs(values: torch.Tensor, how: StoredWeight, shape: Shape) -> torch.Tensor:
    """Scales or zero points as float32 [N, G], each for the outputs that share it."""
    groups = num_groups(how, shape[1])
    values = values.float().reshape(-1, groups)
    if how.rows == 1:
        return values
    return values.repeat_interleave(how.rows or shape[0], dim=0)[: shape[0]].contiguous()


def group_of(how: StoredWeight, inputs: int) -> int:
    """Return the inputs that share a scale, as StoredRows say it."""
    return min(how.group_size or inputs, inputs)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the float32 that e8m0 stands for."""
    return torch.exp2(exponents.view(torch.uint8).float() - EXPONENT_BIAS)


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Take the numbers out of int32 words [R, C]: uint8 [R, C * 32 / bits], the lowest bits of a
    word first. order: the place in its word of each number that comes out."""
    parts = words.contiguous().view(torch.uint8)
    if bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=-1).flatten(1)
    if order is None:
        return parts
    return parts.view(len(parts), -1, len(order))[..., list(order)].flatten(1)


def signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift numbers from 0 on, uint8, to those around zero, int8."""
    return (numbers ^ 0x80).view(torch.int8) if bits == 8 else numbers.view(torch.int8) - 8


def of_some_inputs(
    integers_NK: torch.Tensor,
    bits: int,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor | None,
    groups_K: torch.Tensor,
) -> IntegerRows:
    """Make rows of a part of inputs that were sorted: each has the scale and the zero point of its
    group by itself."""
    groups_K = groups_K.long()
    zeros_NK = None if zeros_GN is None else zeros_GN[groups_K].float().t()
    return IntegerRows(integers_NK, bits, scales_GN[groups_K].float().t(), 1, zeros_NK)


def sorted_by_group(groups_K: torch.Tensor, group_size: int) -> tuple[torch.Tensor | None, bool]:
    """Return the order that sorts inputs by group, None where they are sorted, and whether the
    groups then are those of `group_size` inputs each, the last with the rest."""
    inputs = len(groups_K)
    wanted = torch.arange(inputs) // group_size
    groups_K = groups_K.long() - groups_K.min()  # a rank's first group may be a later one
    if torch.equal(groups_K, wanted) or not groups_K.any():  # all zero: nobody sorted them
        return None, True
    order = groups_K.argsort(stable=True)
    return order, torch.equal(groups_K[order], wanted)
