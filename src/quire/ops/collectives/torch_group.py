"""Ranks that exchange by torch.distributed: gloo on CPUs, NCCL on GPUs.

The process groups are objects of their own: torch's default group is neither needed nor made. Ranks
meet by a store: a FileStore in a private directory on one machine, or one that is given.

NCCL's part follows torch's documentation and has not been run here, for want of two GPUs. Its calls
put work behind the current stream's and do not wait, so graphs can record them.

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

ABORTED = "aborted"  # a key of the store
NAP_S = 20e-6  # between two looks whether gloo is done
CHECK_S = 0.05  # between two looks whether another rank has given up


class TorchGroup:
    """in_order: sum in the order of ranks, whatever the backend would do; for determinism.
    finish: begin an exchange and wait for it, if need be."""

    def __init__(
        self,
        backend: Any,
        place: tuple[int, int],
        finish: Callable[[Callable[[], c10d.Work]], None],
        abort: Callable[[], None],
        in_order: bool,
    ) -> None:
        self.rank, self.size = place
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
        """See RankGroup; always in the order of ranks."""
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
    """Waits for gloo, which cannot be interrupted, by looking: at its work, and now and then at
    the store, where whoever gives up says so."""

    def __init__(self, store: c10d.Store) -> None:
        self._store, self._has_given_up = store, threading.Event()

    def finish(self, begin: Callable[[], c10d.Work]) -> None:
        """Begin an exchange and wait for it."""
        if self._has_given_up.is_set():  # others show below: without them it would not end
            self._check()
        try:
            work, next_check = begin(), time.monotonic() + CHECK_S
            while not work.is_completed():
                time.sleep(NAP_S)
                if self._has_given_up.is_set() or time.monotonic() > next_check:
                    self._check()
                    next_check = time.monotonic() + CHECK_S
            work.wait()
        except RuntimeError as error:
            self.abort()
            raise RankLost(f"Another rank has ended or does not answer: {error}") from None
        if self._has_given_up.is_set():
            self._check()

    def abort(self) -> None:
        """Give up, and tell the others."""
        self._has_given_up.set()
        self._store.set(ABORTED, "1")

    def _check(self) -> None:
        if self._has_given_up.is_set() or self._store.check([ABORTED]):
            self._has_given_up.set()
            raise RankLost("Another rank has failed.")


def file_store(path: str, size: int) -> c10d.Store:
    """Make a store of so many ranks in a file, which must be nobody else's."""
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
    reach; nothing listens elsewhere."""
    gloo: Any = c10d.ProcessGroupGloo  # whose stubs lack what is used here
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
    """Join ranks with a GPU each. Connections are made now, so that graphs may record from the
    first exchange on."""
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
