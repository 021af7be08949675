"""Which of a checkpoint's tensors fill a parameter, and what of them.

Shape legend: N outputs, K inputs, E experts.

A rank that shares layers with others takes a part of most tensors. Only that is read of files: what
is taken of a mapped tensor touches no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.spec.cuts import Cut


@dataclass(frozen=True)
class Part:
    """What a source takes of a checkpoint's tensor: of one dimension `count` places from `first`
    on. whole: the shape of the tensor."""

    dimension: int
    first: int
    count: int
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the part of a parameter that it fills.

    part: of the tensor, if not all of it; what is left is read in the destination's shape.
    transposed: the checkpoint holds that with its last two dimensions exchanged. is_either_way: it
    may do so, which its shape says; of a square one it does not.
    repeated: the checkpoint holds one row of it, which fills all rows.
    rows, columns: what a rank takes of that, of `order_dimension` and of the last one; None: all.
    order: int64, which of these rows each row here is; None: the same. Of a repeated row its
    elements are meant.
    offset: is added to every value. is_logarithm: the checkpoint holds the values' logarithms.
    is_elsewhere: another rank adds these values, so that here they are zeros.
    """

    name: str
    destination: torch.Tensor
    transposed: bool = False
    repeated: bool = False
    part: Part | None = None
    order: torch.Tensor | None = None
    offset: float = 0.0
    order_dimension: int = 0
    is_logarithm: bool = False
    rows: Cut | None = None
    columns: Cut | None = None
    is_elsewhere: bool = False
    is_either_way: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Tell whether the checkpoint's tensor may have this shape."""
        turned = (*shape[:-2], *shape[:-3:-1])
        return self.checkpoint_shape in (shape, turned if self.is_either_way else shape)

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return self.stored_shape if self.part is None else self.part.whole

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what all ranks take of it, as it is stored."""
        shape = self.whole_shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of what all ranks take of it, with outputs before inputs."""
        shape = list(self.destination.shape[1:] if self.repeated else self.destination.shape)
        if self.rows is not None:
            shape[self.order_dimension] = self.rows.whole
        if self.columns is not None:
            shape[-1] = self.columns.whole
        return tuple(shape)

    @property
    def num_taken(self) -> int:
        """Count the numbers that are read of the tensor."""
        if self.is_elsewhere:
            return 0
        return self.destination[0].numel() if self.repeated else self.destination.numel()

    def taken(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the source takes of the checkpoint's tensor, in the destination's shape; a
        view where that can be."""
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
        """Copy the checkpoint's tensor to where it belongs, converting its dtype."""
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
    """What a rank has of a parameter of the whole model, whose last dimension are columns and all
    others rows: stretches of rows, one after the other, and columns of them. Without any it has
    all; so it has all columns without `columns`."""

    cuts: tuple[Cut, ...] = ()
    columns: Cut | None = None

    @property
    def is_all(self) -> bool:
        return self.columns is None and all(cut.is_whole for cut in self.cuts)


ALL = Stretches()


@dataclass(frozen=True, eq=False)
class Rows:
    """What a layer has of the rows of one module of a checkpoint.

    cuts: stretches one after the other, each of a stretch of the module's rows in the layer's
    order. order: int64, which of the checkpoint's rows each of the module's is in that order; None:
    the same.
    """

    cuts: tuple[Cut, ...]
    order: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return sum(cut.count for cut in self.cuts)

    def taken(self) -> tuple[Cut | None, torch.Tensor | None]:
        """Return `rows` and `order` of the sources."""
        if all(cut.is_whole for cut in self.cuts):
            return None, self.order
        if self.order is None and len(self.cuts) == 1:
            return self.cuts[0], None
        places = self.places()
        whole = sum(cut.whole for cut in self.cuts)
        return Cut(whole, 0, whole), places if self.order is None else self.order[places]

    def places(self) -> torch.Tensor:
        """Return which of all rows, in the layer's order, these are: int64."""
        found, begin = [], 0
        for cut in self.cuts:
            found.append(torch.arange(begin + cut.first, begin + cut.first + cut.count))
            begin += cut.whole
        return torch.cat(found)


def rows_of(size: int | Cut | Sequence[Cut], order: torch.Tensor | None = None) -> Rows:
    """Make the rows of one module: so many, all of them; a part; or several."""
    if isinstance(size, int):
        return Rows((Cut(size, 0, size),), order)
    return Rows((size,) if isinstance(size, Cut) else tuple(size), order)
