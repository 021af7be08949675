"""Map checkpoint tensors, or parts of them, to the parameters that they fill.

Shape legend: N outputs, K inputs, E experts.

Under tensor parallelism a rank takes a part of most tensors. Tensors are mapped, so only the pages
of that part are read from the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.spec.cuts import Cut


@dataclass(frozen=True)
class Part:
    """A slice of a checkpoint tensor along one dimension."""

    dimension: int
    first: int  # first index of the slice
    count: int  # length of the slice
    whole: tuple[int, ...]  # shape of the whole tensor


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the part of a parameter that it fills."""

    name: str  # name of the checkpoint tensor
    destination: torch.Tensor  # the parameter or a view of it
    transposed: bool = False  # whether the checkpoint exchanges the last two dimensions
    repeated: bool = False  # whether the tensor is one row that fills all rows of the destination
    part: Part | None = None  # slice that is read, and reshaped to the destination; None for all
    # Permutation, int64: index of the checkpoint row for each destination row; None keeps the
    # order. For a repeated row it permutes the elements.
    order: torch.Tensor | None = None
    offset: float = 0.0  # added to every value
    order_dimension: int = 0  # dimension that `order` and `rows` apply to
    is_logarithm: bool = False  # whether the checkpoint holds the logarithms of the values
    rows: Cut | None = None  # rows of this rank; None for all
    columns: Cut | None = None  # this rank's part of the last dimension; None for all
    is_elsewhere: bool = False  # whether another rank adds these values, so that zeros fill them
    # Whether `transposed` depends on the shape in the checkpoint. Square ones are not transposed.
    is_either_way: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether the checkpoint's tensor may have this shape."""
        turned = (*shape[:-2], *shape[:-3:-1])
        return self.checkpoint_shape in (shape, turned if self.is_either_way else shape)

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Return the shape that the checkpoint's tensor must have."""
        return self.stored_shape if self.part is None else self.part.whole

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the slice that all ranks share, in the checkpoint's layout."""
        shape = self.whole_shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the slice that all ranks share, with outputs before inputs."""
        shape = list(self.destination.shape[1:] if self.repeated else self.destination.shape)
        if self.rows is not None:
            shape[self.order_dimension] = self.rows.whole
        if self.columns is not None:
            shape[-1] = self.columns.whole
        return tuple(shape)

    @property
    def num_taken(self) -> int:
        """Return the number of values that are read from the tensor."""
        if self.is_elsewhere:
            return 0
        return self.destination[0].numel() if self.repeated else self.destination.numel()

    def taken(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's values of a checkpoint tensor with `checkpoint_shape`, such as [N, K].
        The result has the shape of the destination, or of one row if repeated. It is a view if
        possible."""
        if self.part is not None:
            part = self.part
            values = values.narrow(part.dimension, part.first, part.count)
        if self.is_either_way and values.shape[-2:] != self.whole_shape[-2:]:
            values = values.transpose(-2, -1)
        values = values.reshape(self.stored_shape)
        if self.transposed:
            values = values.transpose(-2, -1)
        if self.rows is not None:
            values = values.narrow(self.order_dimension, self.rows.first, self.rows.count)
        if self.columns is not None:
            values = values.narrow(-1, self.columns.first, self.columns.count)
        if self.order is not None:
            values = values.index_select(self.order_dimension, self.order.to(values.device))
        return values

    def fill(self, values: torch.Tensor) -> None:
        """Copy a checkpoint tensor with `checkpoint_shape`, such as [N, K], to the destination, in
        its dtype."""
        if self.is_elsewhere:
            self.destination.zero_()
            return
        self.destination.copy_(self.taken(values))
        if self.offset:
            self.destination.add_(self.offset)
        if self.is_logarithm:
            self.destination.exp_()


@dataclass(frozen=True)
class Stretches:
    """A rank's part of a parameter: ranges of rows, and a range of columns (the last dimension).

    The default is the whole parameter.
    """

    cuts: tuple[Cut, ...] = ()  # consecutive ranges of rows; empty for all rows
    columns: Cut | None = None  # range of columns; None for all columns

    @property
    def is_all(self) -> bool:
        return self.columns is None and all(cut.is_whole for cut in self.cuts)


ALL = Stretches()


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one checkpoint module that a layer holds."""

    cuts: tuple[Cut, ...]  # consecutive ranges of the module's rows, each with its part here
    # Permutation, int64: index of the checkpoint row for each row of the whole module in the
    # layer's order; None keeps the order.
    order: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return sum(cut.count for cut in self.cuts)

    def taken(self) -> tuple[Cut | None, torch.Tensor | None]:
        """Return the fields `rows` and `order` of a Source that takes these rows."""
        if all(cut.is_whole for cut in self.cuts):
            return None, self.order
        if self.order is None and len(self.cuts) == 1:
            return self.cuts[0], None
        indices = self.indices()
        whole = sum(cut.whole for cut in self.cuts)
        return Cut(whole, 0, whole), indices if self.order is None else self.order[indices]

    def indices(self) -> torch.Tensor:
        """Return the index of each held row among the module's rows in the layer's order, int64."""
        found, begin = [], 0
        for cut in self.cuts:
            found.append(torch.arange(begin + cut.first, begin + cut.first + cut.count))
            begin += cut.whole
        return torch.cat(found)


def rows_of(size: int | Cut | Sequence[Cut], order: torch.Tensor | None = None) -> Rows:
    """Return the rows of one module. size: number of rows if this rank holds all, else its part or
    parts. order: index of the checkpoint row for each row, int64 [rows]; see Rows."""
    if isinstance(size, int):
        return Rows((Cut(size, 0, size),), order)
    return Rows((size,) if isinstance(size, Cut) else tuple(size), order)
