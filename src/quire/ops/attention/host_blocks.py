"""Block memory of the host, for sequences that are swapped out (P 4.5) and for the host tier.

At least as many blocks as the device has, so that it can never be too small; taken from the
operating system when the first block is written, and page by page where the device is the host.

A GPU gathers the blocks of a move into one buffer, in the order of its other work, so that they may
be overwritten at once. The buffer crosses to pinned memory on a stream of its own while the step is
computed, and reaches its place in the mirror when somebody asks for it.

Stores read and write single blocks from threads of their own (`read`, `write`). A lock guards what
is on its way and the making of mirrors; the blocks themselves need none, since whoever was told to
move a block is the only one that does.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.memory import lazy_zeros

Int32 = npt.NDArray[np.int32]

PART_BYTES = 16 << 20  # of what a GPU gathers and sends at once

# By bytes per element; numpy does not know all of torch's types, and copies need not.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Arriving:
    """Blocks on their way from a GPU to block ids `destination` of a mirror."""

    place: int
    destination: torch.Tensor
    blocks: torch.Tensor
    done: torch.cuda.Event


class HostBlocks:
    """Mirrors of the device's KV tensors. dim: the dimension that counts blocks; num_blocks: how
    many each has, as many as the device if absent.

    A mirror counts its blocks in the first dimension, so that each is one piece of memory: there
    it takes few large pages, and is read and written at once.
    """

    def __init__(
        self, device_kv: Sequence[torch.Tensor], dim: int, num_blocks: Sequence[int] = ()
    ) -> None:
        self._device_kv = device_kv
        self._num_blocks = tuple(num_blocks) or tuple(kv.shape[dim] for kv in device_kv)
        self._dim = dim
        self._host_kv: list[torch.Tensor | None] = [None] * len(device_kv)
        self._arriving: deque[_Arriving] = deque()
        self._lock = threading.RLock()
        is_gpu = len(device_kv) > 0 and device_kv[0].is_cuda
        self._stream = torch.cuda.Stream(device_kv[0].device) if is_gpu else None

    def swap_out(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks `source` of a device tensor to blocks `destination` of its mirror."""
        for part in self._parts(place, len(source)):
            self._swap_out(place, source[part], destination[part])

    def load(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks back: from `source` of the mirror to `destination` of the device tensor."""
        for part in self._parts(place, len(source)):
            self._load(place, source[part], destination[part])

    def give_back(self) -> None:
        """Return all memory to the system; what the blocks held is lost."""
        with self._lock:
            self._settle()
            self._host_kv = [None] * len(self._device_kv)

    def block_bytes(self, place: int) -> int:
        """Of one block of a device tensor."""
        kv = self._device_kv[place]
        return kv.numel() // kv.shape[self._dim] * kv.element_size()

    def read(self, place: int, block: int) -> memoryview:
        """A copy of a block of a mirror: all of the device's bytes at its index, in C order. From
        any thread."""
        return self._settled_block(place, block).copy().reshape(-1).view(np.uint8).data

    def write(self, place: int, block: int, data: bytes | bytearray | memoryview) -> None:
        """Fill a block of a mirror with bytes as `read` gives them. From any thread.

        Raises ValueError if they are not as many as a block has; then nothing is written.
        """
        values = np.frombuffer(data, np.uint8)
        if len(values) != self.block_bytes(place):
            raise ValueError(
                f"a block of tensor {place} has {self.block_bytes(place)} bytes, got {len(values)};"
                " give bytes that `read` of the same layout gave."
            )
        target = self._settled_block(place, block)
        target[...] = values.view(target.dtype).reshape(target.shape)

    def _settled_block(self, place: int, block: int) -> npt.NDArray[np.signedinteger]:
        """A view of a block of a mirror, after what was on its way there has come. Copied by numpy:
        torch would start a second pool of threads for the thread that asks."""
        with self._lock:
            mirror = self._mirror(place)
            while any(a.place == place and block in a.destination for a in self._arriving):
                self._settle_first()
        values = mirror.view(INTEGERS[mirror.element_size()]).numpy()
        found: npt.NDArray[np.signedinteger] = values[block]
        return found

    def _parts(self, place: int, num_blocks: int) -> Iterator[slice]:
        """A buffer of another size each time would be taken from the operating system anew, which
        takes longer than the copy."""
        size = max(1, PART_BYTES // max(1, self.block_bytes(place)))
        return (slice(start, start + size) for start in range(0, num_blocks, size))

    def _swap_out(self, place: int, source: Int32, destination: Int32) -> None:
        device = self._device_kv[place]
        with self._lock:
            host = self._mirror(place)
        if self._stream is None:
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                host[other].copy_(device.select(self._dim, one))
            return
        blocks = device.index_select(self._dim, _index(source, device)).movedim(self._dim, 0)
        with self._lock:
            self._settle(only_done=True)
            sent = self._send(self._stream, place, _index(destination, host), blocks)
            self._arriving.append(sent)

    def _load(self, place: int, source: Int32, destination: Int32) -> None:
        device = self._device_kv[place]
        with self._lock:
            self._settle()
            host = self._mirror(place)
        if self._stream is None:
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                device.select(self._dim, other).copy_(host[one])
            return
        blocks = host.index_select(0, _index(source, host)).pin_memory()
        blocks = blocks.to(device.device, non_blocking=True).movedim(0, self._dim)
        device.index_copy_(self._dim, _index(destination, device), blocks)

    def _send(
        self, stream: torch.cuda.Stream, place: int, destination: torch.Tensor, blocks: torch.Tensor
    ) -> _Arriving:
        """Begin to copy gathered blocks to pinned memory, beside the work that follows."""
        pinned = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(blocks.device))
        with torch.cuda.stream(stream):
            pinned.copy_(blocks, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        blocks.record_stream(stream)
        return _Arriving(place, destination, pinned, done)

    def _settle(self, only_done: bool = False) -> None:
        """Put what has crossed into its place, in the order in which it was sent; or all, waiting
        for it. The lock is held."""
        while self._arriving and not (only_done and not self._arriving[0].done.query()):
            self._settle_first()

    def _settle_first(self) -> None:
        arrived = self._arriving.popleft()
        arrived.done.synchronize()
        mirror = self._mirror(arrived.place)
        mirror.index_copy_(0, arrived.destination, arrived.blocks)

    def _mirror(self, place: int) -> torch.Tensor:
        mirror = self._host_kv[place]
        if mirror is None:
            like = self._device_kv[place]
            rest = like.shape[: self._dim] + like.shape[self._dim + 1 :]
            shape = (self._num_blocks[place], *rest)
            mirror = lazy_zeros(shape, like.dtype, torch.device("cpu"))
            self._host_kv[place] = mirror
        return mirror


def _index(blocks: Int32, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(blocks, dtype=torch.int64, device=like.device)
