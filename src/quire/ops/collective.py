"""Collective operations of the ranks that compute one model: sums and exchanges of tensors.

They are registered operations, so records and programs contain them. A model on one rank calls
none. All ranks call the same operations in the same order, and get the same bits.

Shape legend: G ranks of the group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.ops.registry import op


class RankGroup(Protocol):
    """Ranks that compute a model together.

    rank: number of this rank, from 0. size: number of ranks.
    num_exchanges: number of exchanges that this rank has begun; any thread may read it.

    Once another rank has ended or aborted, every call raises RankLost.
    """

    rank: int
    size: int

    @property
    def num_exchanges(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x [...] over all ranks; x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks in order of rank, [G, *x.shape]."""
        ...

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        """Sum x_G [G, ...] over all ranks and return this rank's slice, of shape x_G.shape[1:]."""
        ...

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        """Send x_G[g] to rank g. Return the slices received, in order of the sender, [G, ...]."""
        ...

    def abort(self) -> None:
        """Abort the group from any thread. Calls of all ranks raise RankLost, waiting calls too."""
        ...


class Alone:
    """Group of one rank: every exchange returns its input."""

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
    """First of `size` ranks, for planning a model without computing it."""

    def __init__(self, size: int) -> None:
        self.size = size


@op("all_reduce")
def all_reduce(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum of x [...] over all ranks; x may be overwritten."""
    return group.all_reduce(x)


@op("all_gather")
def all_gather(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the tensors of all ranks in order of rank, [G, *x.shape]."""
    return group.all_gather(x)


@op("reduce_scatter")
def reduce_scatter(x_G: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Sum x_G [G, ...] over all ranks and return this rank's slice, of shape x_G.shape[1:]."""
    return group.reduce_scatter(x_G)


@op("all_to_all")
def all_to_all(x_G: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Send x_G[g] to rank g. Return the slices received, in order of the sender, [G, ...]."""
    return group.all_to_all(x_G)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors of one shape in order, so the bits do not depend on the rank that adds. 16-bit
    floating-point tensors are summed in float32 and rounded once."""
    first = parts[0]
    is_short = first.is_floating_point() and first.element_size() < 4
    total = first.float() if is_short else first.clone()
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
