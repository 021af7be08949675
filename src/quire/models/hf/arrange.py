"""Where the columns stand that a translated model's operations read, and whether it is right.

Rows of linear layers are put in the order in which what is read of their results stands side by
side, and in which half-rotation turns the pairs that the class means; attention does not see a
common order of queries and keys. Then the translation is tried: with the same random results of
layers it must call each layer with the same numbers as the class does.

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
    """Columns that an operation reads, by their numbers among those of all buffers.

    heads: 0 if they are not read by head. order: in which the dimensions of each head stand, as a
    text; empty for the class's own. shown: what the class calls a layer with, [T, W].
    """

    columns: Columns
    heads: int = 0
    order: str = ""
    shown: torch.Tensor | None = None


@dataclass(eq=False)
class Call:
    """An operation before it is known where columns stand. write: its buffer. returned: of a layer,
    random numbers [T, W]."""

    name: str
    reads: tuple[Operand, ...]
    write: int
    layer: Any = None
    options: tuple[Any, ...] = ()
    returned: torch.Tensor | None = None


@dataclass(eq=False)
class Buffer:
    """first: the number of its first column. layer: the linear layer that makes it, if one does.
    order: in which its columns stand, if not in the class's own."""

    first: int
    width: int
    layer: NamedLinear | None = None
    order: Columns | None = field(default=None)


class Arrangement:
    """Puts the columns of buffers in order. Raises Unfollowed where there is no order for all who
    read them."""

    def __init__(self, calls: Sequence[Call], buffers: Sequence[Buffer], last: Operand) -> None:
        self._calls, self._buffers = calls, buffers
        self._firsts = [each.first for each in buffers]
        self._wanted: list[dict[bytes, Columns]] = [{} for _ in buffers]
        for operand in (*(read for call in calls for read in call.reads), last):
            index, columns = self._within(operand)
            self._wanted[index][columns.tobytes()] = columns
        for buffer, wanted in zip(buffers, self._wanted, strict=True):
            if any((np.diff(each) != 1).any() for each in wanted.values()):
                buffer.order = _order(buffer, list(wanted.values()))
        steps = [
            Step(each.name, tuple(map(self._read, each.reads)), (each.write,), each.layer,
                 each.options)
            for each in calls
        ]  # fmt: skip
        self._steps, self._last = steps, self._read(last)
        self._try()

    def steps(self, device: torch.device) -> Steps:
        """Return the model for a device, and let its linear layers load their rows in these
        orders."""
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
        """Find the buffer of columns, and where they are there."""
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
    def _try(self) -> None:
        run = _Trial(self._calls, self._buffers)
        for step in self._steps:
            run.carry_out(step)


def _tensors(step: Step) -> list[torch.Tensor]:
    return [each for each in step.options if isinstance(each, torch.Tensor)]


class _Trial(Run):
    """A pass in which layers return what they returned to the class, and must be called with what
    that called them with."""

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


def _order(buffer: Buffer, wanted: list[Columns]) -> Columns:
    """Put sequences of columns side by side, each in its own order, and what nobody reads between
    them; the columns of each module that was merged into the layer stay among themselves."""
    if buffer.layer is None:
        raise Unfollowed("results of something other than a linear layer are read in another order")
    read = np.concatenate(wanted)
    if len(set(read.tolist())) != len(read):
        raise Unfollowed("results are read in two orders")
    others = np.setdiff1d(np.arange(buffer.width), read)
    parts = [*wanted, *(others[at : at + 1] for at in range(len(others)))]
    order: Columns = np.concatenate(sorted(parts, key=lambda each: int(each.min())))
    begin = 0
    for size in buffer.layer.part_sizes:
        part = order[begin : begin + size]
        if part.min() < begin or part.max() >= begin + size:
            raise Unfollowed("rows of several modules would be mixed")
        begin += size
    return order
