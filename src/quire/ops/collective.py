"""What ranks that compute one model together exchange: sums and parts of tensors.

They are operations, so that records and programs contain them. A model of one rank calls none.
Every rank calls the same ones in the same order, and all get the same bits.

Shape legend: G ranks of the group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.ops.registry import op


class RankGroup(Protocol):
    """Ranks that compute together. rank: this one of them, from 0; size: how many there are.
    num_exchanges: how often this one has met the others, or goes to, which any thread may ask.

    Any of the calls raises RankLost where another rank is gone or has given up, from then on.
    """

    rank: int
    size: int

    @property
    def num_exchanges(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors in their order, [G, *x.shape]."""
        ...

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, x_G.shape[1:], of the sum over all ranks."""
        ...

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        """Send part g to rank g; returns what each of them sent here, in their order."""
        ...

    def abort(self) -> None:
        """Give up: all ranks' calls raise RankLost, those that wait too. From any thread."""
        ...


class Alone:
    """A group of one rank, which has all there is."""

    rank, size, num_exchanges = 0, 1, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        return x_G[0]

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        return x_G

    def abort(self) -> None:
        pass


ALONE = Alone()


class FirstOf(Alone):
    """The first of so many ranks, where a model is only planned and nothing computes."""

    def __init__(self, size: int) -> None:
        self.size = size


@op("all_reduce")
def all_reduce(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Sum over all ranks; x may be overwritten."""
    return group.all_reduce(x)


@op("all_gather")
def all_gather(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """All ranks' tensors in their order, [G, *x.shape]."""
    return group.all_gather(x)


@op("reduce_scatter")
def reduce_scatter(x_G: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """This rank's part of the sum over all ranks, x_G.shape[1:]."""
    return group.reduce_scatter(x_G)


@op("all_to_all")
def all_to_all(x_G: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """What each rank sent here, in their order, [G, ...]; part g of x goes to rank g."""
    return group.all_to_all(x_G)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors in their order, so that the bits do not depend on which rank adds; those of 16
    bits as float32, rounded once."""
    first = parts[0]
    is_short = first.is_floating_point() and first.element_size() < 4
    total = first.float() if is_short else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
