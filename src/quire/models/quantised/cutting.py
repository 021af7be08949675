"""Select a rank's outputs and inputs from the tensors of a quantised module.

Outputs may be any set in any order; words and blocks that outputs share are taken whole. Inputs are
one range, which is widened to whole groups and words.
"""

import math
from collections.abc import Callable, Mapping

import torch

from quire.models.quantised.tensors import INPUTS, OUTPUTS, Shape, TensorLayout
from quire.spec.cuts import Cut

Tensors = Mapping[str, torch.Tensor]
Take = Callable[[torch.Tensor, int, int], torch.Tensor]
OF_WHOLE = ".weight_shape"  # suffix of the tensor that holds the whole module's shape


def step_of(
    expected: Mapping[str, TensorLayout], stored: Mapping[str, Shape], shape: Shape, axis: int
) -> int:
    """Return the number of outputs or inputs that must be taken together. stored: shapes of the
    tensors. shape: shape of the module. axis: OUTPUTS or INPUTS."""
    units = [
        _unit(size, shape[own], unit)
        for end, own_shape in stored.items()
        for size, (own, unit) in zip(own_shape, expected[end].axes, strict=False)
        if own == axis
    ]
    return math.lcm(*(unit for unit in units if unit))


def take_outputs(
    tensors: Tensors, expected: Mapping[str, TensorLayout], shape: Shape, index_N: torch.Tensor
) -> tuple[Tensors, Shape, torch.Tensor]:
    """Select outputs by index, int64 [outputs].

    Return the selected tensors, the shape of the module that they form, and the index of each
    requested output in that module, int64 [outputs].
    """
    step = step_of(expected, _shapes(tensors), shape, OUTPUTS)
    blocks = (index_N // step).unique()
    indices = (blocks[:, None] * step + torch.arange(step)).flatten()
    indices = indices[indices < shape[0]]
    own_index = torch.searchsorted(blocks, index_N // step) * step + index_N % step

    def take(values: torch.Tensor, dimension: int, unit: int) -> torch.Tensor:
        return _taken(values, dimension, indices[::unit] // unit)

    return _cut(tensors, expected, shape, OUTPUTS, take), (len(indices), shape[1]), own_index


def take_inputs(
    tensors: Tensors, expected: Mapping[str, TensorLayout], shape: Shape, columns: Cut
) -> tuple[Tensors, Shape, int]:
    """Select a range of inputs. Return the selected tensors, the shape of the module that they
    form, and the index of the first requested input in that module."""
    step = step_of(expected, _shapes(tensors), shape, INPUTS)
    first = columns.first // step * step
    end = min(-(-(columns.first + columns.count) // step) * step, shape[1])

    def take(values: torch.Tensor, dimension: int, unit: int) -> torch.Tensor:
        return values.narrow(dimension, first // unit, -(-end // unit) - first // unit)

    found = _cut(tensors, expected, shape, INPUTS, take)
    return found, (shape[0], end - first), columns.first - first


def _cut(
    tensors: Tensors, expected: Mapping[str, TensorLayout], shape: Shape, axis: int, take: Take
) -> Tensors:
    found = {}
    for end, values in tensors.items():
        if end == OF_WHOLE:
            continue
        for dimension, (own, unit) in enumerate(expected[end].axes[: values.dim()]):
            own_unit = _unit(values.shape[dimension], shape[own], unit) if own == axis else 0
            if own_unit:
                values = take(values, dimension, own_unit)
        found[end] = values
    return found


def _unit(size: int, whole: int, unit: int) -> int:
    """Return the number of elements of an axis per index of a dimension; 0 if all share one index.
    size: length of the dimension. whole: length of the axis."""
    if size == whole:
        return 1
    return 0 if size == 1 else unit


def _taken(values: torch.Tensor, dimension: int, indices: torch.Tensor) -> torch.Tensor:
    first, count = int(indices[0]), len(indices)
    if int(indices[-1]) - first + 1 == count:
        return values.narrow(dimension, first, count)
    return _bytes(values).index_select(dimension, indices).view(values.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Return 1-byte values as uint8, because torch cannot select from all 1-byte dtypes."""
    return values.view(torch.uint8) if values.itemsize == 1 else values


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    return {end: tuple(values.shape) for end, values in tensors.items()}
