"""Host memory of blocks, for swapped-out sequences (P 4.5) and for the host tier.

It has at least as many blocks as the device, so it is never too small. The operating system
allocates it when the first block is written, page by page where the device is the host.

A GPU's blocks are copied alongside its steps (transfers.py). When `swap_out` returns, they may be
overwritten, although they reach the mirror only later. Reads and writes of such mirror blocks wait
for them. Stores read and write single blocks from their own threads (`read`, `write`). A lock
guards the creation of mirrors. The blocks need no lock, since each move has one owner.

Allocating pages early. The first write of a page is expensive. It takes 2.3 ms per MB on a virtual
machine that returns free memory to its host, 0.09 if the machine still had the memory. Reading,
checking and copying a block takes 0.7. So while a request's blocks are fetched, a thread allocates
the pages of the next blocks, using at most a quarter of a core. The system fills new pages with
zeros and leaves existing ones unchanged (MADV_POPULATE_WRITE, Linux 5.14). Without that call
nothing is done. The thread ends with the main thread, which waits for it: a daemon thread would
hold on to modules that are being unloaded.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.blocks.streams import Int32, Streams, streams_of
from quire.ops.blocks.transfers import Blocks, Transfers, as_numpy
from quire.ops.host.host_memory import forget_pages, lazy_zeros
from quire.ops.host.pages import populate
from quire.ops.rows.row_arrays import last_writes

PIECE_BYTES = 4 << 20
REST = 3  # pause after a piece, relative to its time


class PageAllocator:
    """Allocator of a tensor's pages, up to `early_bytes` after the last block in use. dim:
    dimension that counts the blocks, which are first used in the order of their numbers."""

    def __init__(self, blocks: torch.Tensor, dim: int, early_bytes: int) -> None:
        self._blocks, self._dim = blocks, dim
        self._num_blocks = blocks.shape[dim]
        self._num_early = max(1, early_bytes * self._num_blocks // max(1, blocks.nbytes))
        self._num_allocated = 0  # blocks whose pages are requested
        self._lock = threading.Lock()  # guards `_num_allocated`
        self._has_ended = False

    def use(self, block: int) -> None:
        """Record that a block is used, and allocate later blocks if needed. For any thread."""
        if (
            block + self._num_early // 2 < self._num_allocated
            or self._num_allocated == self._num_blocks
        ):
            return
        with self._lock:
            first = self._num_allocated
            self._num_allocated = max(first, min(self._num_blocks, block + 1 + self._num_early))
            last = self._num_allocated
        if first < last:
            name = "quire-memory"
            threading.Thread(target=self._hand_out, args=(first, last), name=name).start()

    def end(self) -> None:
        self._has_ended = True

    def _hand_out(self, first: int, last: int) -> None:
        """Allocate the pages of these blocks, which are one piece in each of the tensor's parts."""
        shape, base = self._blocks.shape, self._blocks.data_ptr()
        block_bytes = math.prod(shape[self._dim + 1 :]) * self._blocks.element_size()
        for part in range(math.prod(shape[: self._dim])):
            begin = base + (part * self._num_blocks + first) * block_bytes
            end = begin + (last - first) * block_bytes
            for start in range(begin, end, PIECE_BYTES):
                began = time.perf_counter()
                if self._has_ended or not threading.main_thread().is_alive():
                    return
                if not populate(start, min(PIECE_BYTES, end - start)):
                    return
                time.sleep(REST * (time.perf_counter() - began))


PART_BYTES = 16 << 20  # size of a part, which a GPU gathers and sends at once
NUM_SLOTS = 8  # parts in transit at once; each takes PART_BYTES of pinned and of device memory
EARLY_BYTES = (
    512 << 20
)  # allocated early, of host memory and of a CPU device, after `allocate_early`
MIN_SLOTS = 2  # for blocks larger than a part, such as states of many layers


class HostBlocks:
    """Host mirrors of the device's KV tensors. dim: dimension that counts blocks. num_blocks:
    blocks of each mirror, as many as on the device if empty. streams: streams of the device, found
    if None. part_bytes, num_slots: see PART_BYTES and NUM_SLOTS.

    A mirror counts its blocks in its first dimension, so each block is one piece of memory. It
    spans few large pages, and is read and written at once.
    """

    def __init__(
        self,
        device_kv: Sequence[torch.Tensor],
        dim: int,
        num_blocks: Sequence[int] = (),
        *,
        streams: Streams | None = None,
        part_bytes: int = PART_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._device_kv = device_kv
        self._num_blocks = tuple(num_blocks) or tuple(kv.shape[dim] for kv in device_kv)
        self._dim = dim
        self._part_bytes = part_bytes
        self._host_kv: list[torch.Tensor | None] = [None] * len(device_kv)
        self._lock = threading.Lock()
        self._allocates_early = False
        self._host_allocators: list[PageAllocator | None] = [None] * len(device_kv)
        self._device_allocators: list[PageAllocator | None] = [None] * len(device_kv)
        if streams is None and device_kv:
            streams = streams_of(device_kv[0])
        self._transfers: Transfers | None = None
        if streams is not None:
            largest = max(self.block_bytes(tensor_index) for tensor_index in range(len(device_kv)))
            slot_bytes = max(part_bytes, largest)
            num_slots = max(MIN_SLOTS, num_slots * part_bytes // slot_bytes)
            self._transfers = Transfers(streams, slot_bytes, num_slots)

    def allocate_early(self) -> None:
        """Allocate pages ahead of their use from now on, because a request waits for the blocks
        written there."""
        self._allocates_early = True
        for tensor_index, kv in enumerate(self._device_kv):
            if kv.numel() and kv.device.type == "cpu":
                self._device_allocators[tensor_index] = self._start_allocator(kv, self._dim)
            self._mirror(tensor_index)

    def swap_out(self, tensor_index: int, source: Int32, destination: Int32) -> None:
        """Copy blocks `source` of device tensor `tensor_index` to blocks `destination` of its
        mirror.
        Waits only if all slots are in use."""
        mirror, device = self._mirror(tensor_index), self._device_kv[tensor_index]
        _note(self._host_allocators[tensor_index], destination)
        if self._transfers is None:
            read, write = _blocks_of(device, self._dim), _blocks_of(mirror, 0)
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                write[0, other].reshape(len(read), -1)[...] = read[:, one]
            return
        destination = destination.copy()  # read later
        for part in self._parts(tensor_index, len(source)):
            blocks = Blocks(
                tensor_index, device, self._dim, mirror, source[part], destination[part]
            )
            self._transfers.out(blocks)

    def load(self, tensor_index: int, source: Int32, destination: Int32) -> None:
        """Copy blocks `source` of a mirror to blocks `destination` of the device tensor. Waits for
        blocks that are still on their way to `source`."""
        mirror, device = self._mirror(tensor_index), self._device_kv[tensor_index]
        _note(self._device_allocators[tensor_index], destination)
        if self._transfers is None:
            read, write = _blocks_of(mirror, 0), _blocks_of(device, self._dim)
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                write[:, other] = read[0, one].reshape(len(write), -1)
            return
        last = last_writes(destination)
        source, destination = source[last], destination[last]
        for part in self._parts(tensor_index, len(source)):
            blocks = Blocks(
                tensor_index, device, self._dim, mirror, destination[part], source[part]
            )
            self._transfers.into(blocks)

    def free_mirrors(self) -> None:
        """Return the mirrors' memory to the system; the contents are lost."""
        if self._transfers is not None:
            self._transfers.wait()
        with self._lock:
            for allocator in self._host_allocators:
                if allocator is not None:
                    allocator.end()
            self._host_kv = [None] * len(self._device_kv)
            self._host_allocators = [None] * len(self._device_kv)

    def free(self, *, mirrors: bool) -> None:
        """Return the memory of all blocks of a CPU to the system, with mirrors or without; the
        contents are lost. The next write of a page allocates it again."""
        for kv in self._device_kv:
            forget_pages(kv)
        if mirrors:
            self.free_mirrors()

    def block_bytes(self, tensor_index: int) -> int:
        """Return the bytes of one block of a device tensor."""
        kv = self._device_kv[tensor_index]
        return kv.numel() // kv.shape[self._dim] * kv.element_size()

    def regions(self) -> list[tuple[int, int]]:
        """Return address and bytes of each mirror; creates all mirrors."""
        mirrors = [self._mirror(tensor_index) for tensor_index in range(len(self._device_kv))]
        return [(mirror.data_ptr(), mirror.nbytes) for mirror in mirrors]

    def address(self, tensor_index: int, block: int) -> int:
        """Return the address of a block of a mirror."""
        return self._mirror(tensor_index).data_ptr() + block * self.block_bytes(tensor_index)

    def read(self, tensor_index: int, block: int) -> memoryview:
        """Return a copy of a block of a mirror: all of the device's bytes at its index, in C order.
        Any thread may call it."""
        return self._settled_block(tensor_index, block).copy().reshape(-1).view(np.uint8).data

    def write(self, tensor_index: int, block: int, data: bytes | bytearray | memoryview) -> None:
        """Fill a block of a mirror with bytes in the order of `read`. Any thread may call it.

        Raises ValueError, and writes nothing, if the number of bytes is not a block's.
        """
        values = np.frombuffer(data, np.uint8)
        if len(values) != self.block_bytes(tensor_index):
            raise ValueError(
                f"a block of tensor {tensor_index} has {self.block_bytes(tensor_index)} bytes,"
                f" got {len(values)};"
                " give bytes that `read` of the same layout gave."
            )
        target, allocator = (
            self._settled_block(tensor_index, block),
            self._host_allocators[tensor_index],
        )
        if allocator is not None:
            allocator.use(block)
        target[...] = values.view(target.dtype).reshape(target.shape)

    def _settled_block(self, tensor_index: int, block: int) -> npt.NDArray[np.integer]:
        """Return a view of a block of a mirror once no move to it is in transit. Copies use numpy,
        because torch would start a second pool of threads for the calling thread."""
        if self._transfers is not None:
            self._transfers.wait_for(tensor_index, np.array([block], np.int32))
        found: npt.NDArray[np.integer] = as_numpy(self._mirror(tensor_index))[block]
        return found

    def _parts(self, tensor_index: int, num_blocks: int) -> Iterator[slice]:
        """Cut a move into slices of as many blocks as fit a slot."""
        size = max(1, self._part_bytes // max(1, self.block_bytes(tensor_index)))
        return (slice(start, start + size) for start in range(0, num_blocks, size))

    def _mirror(self, tensor_index: int) -> torch.Tensor:
        """Return a mirror; create it on first use, which may be by a store."""
        with self._lock:
            mirror = self._host_kv[tensor_index]
            if mirror is None:
                like = self._device_kv[tensor_index]
                rest = like.shape[: self._dim] + like.shape[self._dim + 1 :]
                shape = (self._num_blocks[tensor_index], *rest)
                mirror = lazy_zeros(shape, like.dtype, torch.device("cpu"))
                self._host_kv[tensor_index] = mirror
                if self._allocates_early and mirror.numel():
                    self._host_allocators[tensor_index] = self._start_allocator(mirror, 0)
        return mirror

    def _start_allocator(self, blocks: torch.Tensor, dim: int) -> PageAllocator:
        allocator = PageAllocator(blocks, dim, EARLY_BYTES // len(self._device_kv))
        allocator.use(-1)
        return allocator


def _blocks_of(kv: torch.Tensor, dim: int) -> npt.NDArray[np.integer]:
    """View a tensor as [parts, blocks, numbers], with numbers as wide as possible. numpy copies
    them on the calling thread; torch would start and await its other threads for each block."""
    parts, num_blocks = math.prod(kv.shape[:dim]), kv.shape[dim]
    values = kv.view(torch.uint8).view(parts, num_blocks, -1).numpy()
    return values.view(np.uint64 if values.shape[-1] % 8 == 0 else np.uint8)


def _note(allocator: PageAllocator | None, blocks: Int32) -> None:
    """Record that blocks are written."""
    if allocator is not None and len(blocks):
        allocator.use(int(blocks.max()))
