"""Group of ranks that are processes of one machine, over shared memory (csrc/shared_group.h).

Shape legend: G ranks of the group.
"""

import torch

from quire.base.errors import ConfigError, EngineError
from quire.ops.host.native import core
from quire.ops.host.native_types import CoreGroup
from quire.ops.host.threads import num_threads

SLOT_BYTES = 256 * 1024  # size of a piece: fits a core's own cache next to its working data
NUMBERS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int32: 4,
    torch.int64: 5,
}


class SharedGroup:
    """Rank of a group of processes that map one file. Tensors are on the CPU. core: the C++ object,
    which programs use."""

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        *,
        timeout_s: float = 300.0,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Join the other ranks, which give the same path and sizes. The first rank creates the
        file. Unnamed memory (os.memfd_create) has the path /proc/self/fd/N. timeout_s: maximum wait
        for another rank. Raises ConfigError or EngineError if joining fails."""
        if not 0 <= rank < size:
            raise ConfigError(f"A rank must be from 0 to size - 1 = {size - 1}, got {rank}.")
        native = core()
        if native is None:
            raise ConfigError("Ranks on a CPU share memory by the C++ core, which was not built.")
        self.rank, self.size = rank, size
        try:
            self.core: CoreGroup = native.SharedGroup(path, rank, size, slot_bytes, timeout_s)
        except RuntimeError as error:
            raise EngineError(f"Rank {rank} of {size} cannot share memory. {error}") from None

    @property
    def seconds(self) -> float:
        """Total time of exchanges so far, including waits."""
        return self.core.seconds

    @property
    def num_exchanges(self) -> int:
        """See RankGroup; a large tensor counts once per piece."""
        return self.core.num_exchanges

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup; overwrites x if it is contiguous."""
        x = x.contiguous()
        self.core.all_reduce(x.data_ptr(), x.numel(), NUMBERS[x.dtype], num_threads())
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup; accepts any dtype."""
        x = x.contiguous()
        out_G = x.new_empty(self.size, *x.shape)
        self.core.all_gather(out_G.data_ptr(), x.data_ptr(), x.nbytes, num_threads())
        return out_G

    def reduce_scatter(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        x_G = x_G.contiguous()
        out = x_G.new_empty(x_G.shape[1:])
        number = NUMBERS[x_G.dtype]
        self.core.reduce_scatter(out.data_ptr(), x_G.data_ptr(), out.numel(), number, num_threads())
        return out

    def all_to_all(self, x_G: torch.Tensor) -> torch.Tensor:
        """See RankGroup; accepts any dtype."""
        x_G = x_G.contiguous()
        out_G = torch.empty_like(x_G)
        num_bytes = x_G.nbytes // self.size
        self.core.all_to_all(out_G.data_ptr(), x_G.data_ptr(), num_bytes, num_threads())
        return out_G

    def abort(self) -> None:
        """See RankGroup."""
        self.core.abort()
