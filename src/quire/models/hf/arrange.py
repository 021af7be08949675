"""Arrangement of the columns that a translated model's operations read, and its verification.

Rows of linear layers are reordered so that each operation reads adjacent columns. The order also
makes half-rotation turn the pairs that the class turns; attention is invariant to a common order of
query and key dimensions. Then the translation is verified: with the same random results of layers,
it must call each layer with the same numbers as the class does.

Shape legend: T tokens, W columns.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.models.hf.merge import merged
from quire.models.hf.modules import NamedLinear
from quire.models.hf.steps import ATTEND, EMBEDDING, LAYER, Read, Run, Step, Steps
from quire.models.hf.terms import Unfollowed

Columns = npt.NDArray[np.int64]
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Operand:
    """Columns that an operation reads, numbered over all buffers.

    columns: int64 [W]. heads: 0 if they are not read by head. order: order of the dimensions in
    each head, as text; empty for the class's own order. shown: the argument in the class's pass,
    [T, W].
    """

    columns: Columns
    heads: int = 0
    order: str = ""
    shown: torch.Tensor | None = None


@dataclass(eq=False)
class Call:
    """Operation before its columns are arranged. write: its buffer. returned: the random result of
    a layer, [T, W]."""

    name: str
    reads: tuple[Operand, ...]
    write: int
    layer: Any = None
    options: tuple[Any, ...] = ()
    returned: torch.Tensor | None = None


@dataclass(eq=False)
class Buffer:
    """Result of an operation. first: number of its first column. layer: the linear layer that
    computes it, or None. order: int64 [W], order of its columns; None for the class's own order."""

    first: int
    width: int
    layer: NamedLinear | None = None
    order: Columns | None = field(default=None)


class Arrangement:
    """Order of the columns of all buffers. Raises Unfollowed if no order suits every reader."""

    def __init__(self, calls: Sequence[Call], buffers: Sequence[Buffer], last: Operand) -> None:
        self._calls, self._buffers = calls, buffers
        self._firsts = [each.first for each in buffers]
        self._required: list[dict[bytes, Columns]] = [{} for _ in buffers]
        for operand in (*(read for call in calls for read in call.reads), last):
            index, columns = self._within(operand)
            self._required[index][columns.tobytes()] = columns
        for buffer, required in zip(buffers, self._required, strict=True):
            if any((np.diff(each) != 1).any() for each in required.values()):
                buffer.order = _order(buffer, list(required.values()))
        steps = [
            Step(each.name, tuple(map(self._read, each.reads)), (each.write,), each.layer,
                 each.options)
            for each in calls
        ]  # fmt: skip
        self._steps, self._last = steps, self._read(last)
        self._verify()

    def steps(self, device: torch.device) -> Steps:
        """Return the model on a device, and set the row orders that its linear layers load."""
        for buffer in self._buffers:
            if buffer.order is not None and buffer.layer is not None:
                buffer.layer.reorder(torch.from_numpy(buffer.order))
        moved = {id(each): each.to(device) for step in self._steps for each in _tensors(step)}
        steps = [
            replace(step, options=tuple(moved.get(id(each), each) for each in step.options))
            for step in self._steps
        ]
        return Steps(merged(steps), len(self._buffers), self._last)

    def _within(self, operand: Operand) -> tuple[int, Columns]:
        """Return the buffer of an operand's columns, and their indices in it."""
        index = bisect_right(self._firsts, int(operand.columns[0])) - 1
        columns, buffer = operand.columns - self._firsts[index], self._buffers[index]
        if columns.min() < 0 or columns.max() >= buffer.width:
            raise Unfollowed("results of several layers are read side by side")
        return index, columns

    def _read(self, operand: Operand) -> Read:
        index, columns = self._within(operand)
        order = self._buffers[index].order
        first = int(columns[0])
        if order is not None:
            first = int(np.flatnonzero(order == first)[0])
            if not np.array_equal(order[first : first + len(columns)], columns):
                raise Unfollowed("results are read in two orders")
        return Read(index, first, len(columns), operand.heads)

    @torch.no_grad()
    def _verify(self) -> None:
        run = _Trial(self._calls, self._buffers)
        for step in self._steps:
            run.carry_out(step)


def _tensors(step: Step) -> list[torch.Tensor]:
    return [each for each in step.options if isinstance(each, torch.Tensor)]


class _Trial(Run):
    """Verification pass, in which layers return their results of the class's pass. Their arguments
    must be equal to the arguments in that pass."""

    def __init__(self, calls: Sequence[Call], buffers: Sequence[Buffer]) -> None:
        nothing: Any = None
        tokens = len(next(each.returned for each in calls if each.returned is not None))
        super().__init__(nothing, torch.arange(tokens), nothing, [None] * len(buffers))
        self._calls = {call.write: call for call in calls}
        self._orders = [buffer.order for buffer in buffers]

    def result(self, step: Step, operands: list[torch.Tensor]) -> torch.Tensor:
        if step.name not in (LAYER, EMBEDDING, ATTEND):
            return super().result(step, operands)
        call = self._calls[step.writes[0]]
        for operand, read in zip(operands, call.reads, strict=True):
            assert read.shown is not None
            if not torch.allclose(operand.flatten(1), read.shown, TOLERANCE, TOLERANCE):
                raise Unfollowed(f"{type(step.layer).__name__} would be called with other numbers")
        order = self._orders[step.writes[0]]
        assert call.returned is not None
        return call.returned if order is None else call.returned[:, torch.from_numpy(order)]


def _order(buffer: Buffer, required: list[Columns]) -> Columns:
    """Return an order of the buffer's columns in which each sequence of `required` is contiguous.
    Columns without readers go between these. Columns of each module merged into the layer stay
    together."""
    if buffer.layer is None:
        raise Unfollowed("results of something other than a linear layer are read in another order")
    read = np.concatenate(required)
    if len(set(read.tolist())) != len(read):
        raise Unfollowed("results are read in two orders")
    others = np.setdiff1d(np.arange(buffer.width), read)
    parts = [*required, *(others[at : at + 1] for at in range(len(others)))]
    order: Columns = np.concatenate(sorted(parts, key=lambda each: int(each.min())))
    begin = 0
    for size in buffer.layer.part_sizes:
        part = order[begin : begin + size]
        if part.min() < begin or part.max() >= begin + size:
            raise Unfollowed("rows of several modules would be mixed")
        begin += size
    return order
