"""Group of ranks that are threads of one process: for tests, and the reference for other groups.

Shape legend: G ranks of the group.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quire.base.errors import RankLost
from quire.ops.collective import RankGroup, sum_in_order

T = TypeVar("T")


class ThreadRendezvous:
    """Rendezvous where each thread deposits a tensor, and reads all once the last has arrived."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(
        self, rank: int, part: torch.Tensor, take: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        """Return `take` of all ranks' parts [...]; the result must not share their memory."""
        self._parts[rank] = part
        try:
            self._barrier.wait()
            taken = take(self._parts)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLost("Another rank has failed, or missed the deadline.") from None
        return taken

    def abort(self) -> None:
        """Wake all waiting threads; every later exchange fails."""
        self._barrier.abort()


class ThreadGroup:
    """Rank of a group of threads that exchange at `rendezvous`."""

    def __init__(self, rank: int, rendezvous: ThreadRendezvous) -> None:
        self.rank, self.size = rank, rendezvous.size
        self._rendezvous = rendezvous
        self.num_exchanges = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return self._exchange(x, sum_in_order)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        return self._exchange(x, torch.stack)

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        rank = self.rank
        return self._exchange(x_G, lambda parts: sum_in_order([part[rank] for part in parts]))

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        rank = self.rank
        return self._exchange(x_G, lambda parts: torch.stack([part[rank] for part in parts]))

    def abort(self) -> None:
        """See RankGroup."""
        self._rendezvous.abort()

    def _exchange(
        self, part: torch.Tensor, take: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.num_exchanges += 1
        return self._rendezvous.exchange(self.rank, part, take)


def thread_groups(size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
    """Make a group object for each of `size` threads. timeout_s: maximum wait for the others."""
    rendezvous = ThreadRendezvous(size, timeout_s)
    return [ThreadGroup(rank, rendezvous) for rank in range(size)]


def run_ranks(size: int, work: Callable[[RankGroup], T], timeout_s: float = 60.0) -> list[T]:
    """Run `work` on `size` threads as ranks; return their results. The first error is raised once
    all threads have ended."""
    groups = thread_groups(size, timeout_s)
    raised: list[BaseException] = []

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException as error:
            raised.append(error)
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
    if raised:
        raise raised[0]
    return [future.result() for future in futures]
