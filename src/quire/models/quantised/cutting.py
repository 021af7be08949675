"""What a rank takes of the tensors of a quantised module: those of its outputs and inputs.

Outputs may be any, in any order; of words and blocks that outputs share, whole ones are taken.
Inputs are a stretch, of which as much more is taken as groups and words need.
"""

import math
from collections.abc import Callable, Mapping

import torch

from quire.models.quantised.tensors import INPUTS, OUTPUTS, Shape, Wanted
from quire.spec.cuts import Cut

Tensors = Mapping[str, torch.Tensor]
Take = Callable[[torch.Tensor, int, int], torch.Tensor]
OF_WHOLE = ".weight_shape"  # an end whose values tell the whole module's sizes


def step_of(
    wanted: Mapping[str, Wanted], stored: Mapping[str, Shape], shape: Shape, axis: int
) -> int:
    """Return how many outputs, or inputs, can only be taken together. stored: the tensors' shapes.
    shape: the module's."""
    units = [
        _unit(size, shape[own], unit)
        for end, own_shape in stored.items()
        for size, (own, unit) in zip(own_shape, wanted[end].axes, strict=False)
        if own == axis
    ]
    return math.lcm(*(unit for unit in units if unit))


def take_outputs(
    tensors: Tensors, wanted: Mapping[str, Wanted], shape: Shape, index_N: torch.Tensor
) -> tuple[Tensors, Shape, torch.Tensor]:
    """Take the outputs of an index, int64. Returns the tensors, the shape of the module that they
    are, and which of its outputs the wanted ones are."""
    step = step_of(wanted, _shapes(tensors), shape, OUTPUTS)
    blocks = (index_N // step).unique()
    places = (blocks[:, None] * step + torch.arange(step)).flatten()
    places = places[places < shape[0]]
    own_index = torch.searchsorted(blocks, index_N // step) * step + index_N % step

    def take(values: torch.Tensor, dimension: int, unit: int) -> torch.Tensor:
        return _taken(values, dimension, places[::unit] // unit)

    return _cut(tensors, wanted, shape, OUTPUTS, take), (len(places), shape[1]), own_index


def take_inputs(
    tensors: Tensors, wanted: Mapping[str, Wanted], shape: Shape, columns: Cut
) -> tuple[Tensors, Shape, int]:
    """Take a stretch of inputs. Returns the tensors, the shape of the module that they are, and
    where the stretch begins in it."""
    step = step_of(wanted, _shapes(tensors), shape, INPUTS)
    first = columns.first // step * step
    end = min(-(-(columns.first + columns.count) // step) * step, shape[1])

    def take(values: torch.Tensor, dimension: int, unit: int) -> torch.Tensor:
        return values.narrow(dimension, first // unit, -(-end // unit) - first // unit)

    found = _cut(tensors, wanted, shape, INPUTS, take)
    return found, (shape[0], end - first), columns.first - first


def _cut(
    tensors: Tensors, wanted: Mapping[str, Wanted], shape: Shape, axis: int, take: Take
) -> Tensors:
    found = {}
    for end, values in tensors.items():
        if end == OF_WHOLE:
            continue
        for dimension, (own, unit) in enumerate(wanted[end].axes[: values.dim()]):
            own_unit = _unit(values.shape[dimension], shape[own], unit) if own == axis else 0
            if own_unit:
                values = take(values, dimension, own_unit)
        found[end] = values
    return found


def _unit(size: int, whole: int, unit: int) -> int:
    """Return how many of an axis of `whole` one place of a dimension stands for, which has so many
    places; 0: all share it."""
    if size == whole:
        return 1
    return 0 if size == 1 else unit


def _taken(values: torch.Tensor, dimension: int, places: torch.Tensor) -> torch.Tensor:
    first, count = int(places[0]), len(places)
    if int(places[-1]) - first + 1 == count:
        return values.narrow(dimension, first, count)
    return _bytes(values).index_select(dimension, places).view(values.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """As a dtype of the same size that can be selected from."""
    return values.view(torch.uint8) if values.itemsize == 1 else values


def _shapes(tensors: Tensors) -> dict[str, Shape]:
    return {end: tuple(values.shape) for end, values in tensors.items()}
