"""Group of ranks that exchange by torch.distributed: gloo on CPUs, NCCL on GPUs.

The process groups are separate objects: torch's default group is neither needed nor created. Ranks
find each other by a store: a FileStore in a private directory on one machine, or a given store.

The NCCL part follows torch's documentation and has not been run here, because that takes two GPUs.
Its calls enqueue work on the current stream and do not wait, so graphs can record them.

Shape legend: G ranks of the group.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from quire.base.errors import ConfigError, RankLost
from quire.ops.collective import sum_in_order

ABORTED = "aborted"  # key of the store
NAP_S = 20e-6  # interval of checks whether gloo is done
CHECK_S = 0.05  # interval of checks whether another rank has aborted


class TorchGroup:
    """Rank of a group that uses a torch backend. in_order: sum in order of rank, for determinism,
    instead of the backend's order. finish: begins an exchange and, if needed, waits for it."""

    def __init__(
        self,
        backend: Any,
        rank_and_size: tuple[int, int],
        finish: Callable[[Callable[[], c10d.Work]], None],
        abort: Callable[[], None],
        in_order: bool,
    ) -> None:
        self.rank, self.size = rank_and_size
        self._backend, self._wait, self._abort = backend, finish, abort
        self._in_order = in_order
        self.num_exchanges = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        if self._in_order:
            return sum_in_order(self.all_gather(x).unbind())
        x = x.contiguous()
        self._finish(lambda: self._backend.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        out_G = x.new_empty(self.size, *x.shape)
        own, out = x.contiguous().view(-1), out_G.view(-1)
        self._finish(lambda: self._backend._allgather_base(out, own))
        return out_G

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup; always sums in order of rank."""
        return sum_in_order(self.all_to_all(x_G).unbind())

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        out_G = torch.empty_like(x_G, memory_format=torch.contiguous_format)
        own, out = x_G.contiguous().view(-1), out_G.view(-1)
        self._finish(lambda: self._backend.alltoall_base(out, own, [], []))
        return out_G

    def abort(self) -> None:
        """See RankGroup."""
        self._abort()

    def _finish(self, begin: Callable[[], c10d.Work]) -> None:
        self.num_exchanges += 1
        self._wait(begin)


class GlooWaiting:
    """Waiter for gloo's exchanges, which cannot be interrupted. It polls the exchange and, at
    intervals, the store, where a rank that aborts sets a key."""

    def __init__(self, store: c10d.Store) -> None:
        self._store, self._is_aborted = store, threading.Event()

    def finish(self, begin: Callable[[], c10d.Work]) -> None:
        """Begin an exchange and wait for it. Raises RankLost if another rank aborts or is
        unreachable."""
        if self._is_aborted.is_set():  # the loop below finds other ranks' aborts
            self._check()
        try:
            work, next_check = begin(), time.monotonic() + CHECK_S
            while not work.is_completed():
                time.sleep(NAP_S)
                if self._is_aborted.is_set() or time.monotonic() > next_check:
                    self._check()
                    next_check = time.monotonic() + CHECK_S
            work.wait()
        except RuntimeError as error:
            self.abort()
            raise RankLost(f"Another rank has ended or does not answer: {error}") from None
        if self._is_aborted.is_set():
            self._check()

    def abort(self) -> None:
        """Abort, and notify the other ranks by the store."""
        self._is_aborted.set()
        self._store.set(ABORTED, "1")

    def _check(self) -> None:
        if self._is_aborted.is_set() or self._store.check([ABORTED]):
            self._is_aborted.set()
            raise RankLost("Another rank has failed.")


def file_store(path: str, size: int) -> c10d.Store:
    """Make a store for `size` ranks in a file of their own."""
    return c10d.FileStore(path, size)


def gloo_group(
    store: c10d.Store,
    rank: int,
    size: int,
    *,
    timeout_s: float = 300.0,
    hostname: str = "127.0.0.1",
    in_order: bool = False,
) -> TorchGroup:
    """Join ranks whose tensors are on CPUs. hostname: an address of this machine that the others
    reach; the group listens only there. Raises RankLost if they are unreachable."""
    gloo: Any = c10d.ProcessGroupGloo  # its stubs lack the names used here
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [gloo.create_device(hostname=hostname)]
    try:
        backend = gloo(store, rank, size, options)
    except RuntimeError as error:
        raise RankLost(f"Rank {rank} of {size} cannot reach the other ranks: {error}") from None
    waiting = GlooWaiting(store)
    return TorchGroup(backend, (rank, size), waiting.finish, waiting.abort, in_order)


def nccl_group(
    store: c10d.Store,
    rank: int,
    size: int,
    device: torch.device,
    *,
    timeout_s: float = 300.0,
    in_order: bool = False,
) -> TorchGroup:
    """Join ranks with one GPU each. It connects now, so that graphs may record from the first
    exchange on."""
    if not dist.is_nccl_available():
        raise ConfigError("Ranks on GPUs exchange by NCCL, which this torch was built without.")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)

    def finish(begin: Callable[[], c10d.Work]) -> None:
        try:
            begin().wait()  # the stream waits, not the host
        except RuntimeError as error:
            raise RankLost(f"Another rank has ended or does not answer: {error}") from None

    return TorchGroup(backend, (rank, size), finish, backend.abort, in_order)
