"""Block memory of the host, for sequences that are swapped out (P 4.5).

As many blocks as the device has, so that it can never be too small; taken from the operating system
when the first sequence is swapped out, and page by page where the device is the host itself.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.memory import lazy_zeros

Int32 = npt.NDArray[np.int32]


class HostBlocks:
    """Mirrors of the device's KV tensors. dim: the dimension that counts blocks."""

    def __init__(self, device_kv: Sequence[torch.Tensor], dim: int) -> None:
        self._device_kv = device_kv
        self._dim = dim
        self._host_kv: list[torch.Tensor | None] = [None] * len(device_kv)

    def swap_out(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks `source` of a device tensor to blocks `destination` of its mirror."""
        device, host = self._device_kv[place], self._mirror(place)
        blocks = device.index_select(self._dim, _index(source, device))
        host.index_copy_(self._dim, _index(destination, host), blocks.to(host.device))

    def load(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks back: from `source` of the mirror to `destination` of the device tensor."""
        device, host = self._device_kv[place], self._mirror(place)
        blocks = host.index_select(self._dim, _index(source, host))
        device.index_copy_(self._dim, _index(destination, device), blocks.to(device.device))

    def _mirror(self, place: int) -> torch.Tensor:
        mirror = self._host_kv[place]
        if mirror is None:
            like = self._device_kv[place]
            mirror = lazy_zeros(tuple(like.shape), like.dtype, torch.device("cpu"))
            self._host_kv[place] = mirror
        return mirror


def _index(blocks: Int32, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(blocks, dtype=torch.int64, device=like.device)
