"""Parts of a group of ranks as smaller groups, by exchanges of the whole group.

Shape legend: G ranks of the whole group, C ranks of a part.
"""

import torch

from quire.ops.collective import ALONE, RankGroup, sum_in_order


class Neighbours:
    """Group of C consecutive ranks of a whole group, from a multiple of C on. All parts exchange at
    the same time, so each call moves G / C times as much data as a group of C ranks would."""

    def __init__(self, whole: RankGroup, size: int) -> None:
        assert whole.size % size == 0, "parts are equally large"
        self.rank, self.size = whole.rank % size, size
        self._whole, self._first = whole, whole.rank - self.rank

    @property
    def num_exchanges(self) -> int:
        """See RankGroup; counted in the whole group."""
        return self._whole.num_exchanges

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup; sums in order of rank."""
        return sum_in_order(self.all_gather(x).unbind())

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return self._own(self._whole.all_gather(x))

    def reduce_scatter(self, x_C: torch.Tensor) -> torch.Tensor:
        """See RankGroup; sums in order of rank."""
        return sum_in_order(self.all_to_all(x_C).unbind())

    def all_to_all(self, x_C: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        x_G = x_C.new_zeros(self._whole.size, *x_C.shape[1:])
        self._own(x_G).copy_(x_C)
        return self._own(self._whole.all_to_all(x_G))

    def abort(self) -> None:
        """See RankGroup; aborts the whole group."""
        self._whole.abort()

    def _own(self, x_G: torch.Tensor) -> torch.Tensor:
        return x_G[self._first : self._first + self.size]


def neighbours(whole: RankGroup, size: int) -> RankGroup:
    """Return the group of `size` neighbouring ranks that contains this rank."""
    if size == 1:
        return ALONE
    return whole if size == whole.size else Neighbours(whole, size)
