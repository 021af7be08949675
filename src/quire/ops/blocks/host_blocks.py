"""Block memory of the host, for sequences that are swapped out (P 4.5) and for the host tier.

It has at least as many blocks as the device, so that it can never be too small. The operating
system hands it out when the first block is written, page by page where the device is the host.

A GPU's blocks cross alongside its steps (transfers.py): when `swap_out` returns they may be
overwritten, and reach their places in the mirror later. A reader or writer of those places waits
for them. Stores read and write single blocks from threads of their own (`read`, `write`). A lock
guards the making of mirrors; the blocks need none, since each move has one owner.

Pages ahead of use. A page costs most when it is written for the first time: 2.3 ms per MB on a
virtual machine that gives free memory back to its host, 0.09 where the machine had the memory at
hand; reading, checking and copying a block takes 0.7. So while blocks are fetched for a request,
a thread that takes a quarter of a core at most has the pages of the next ones handed out. The
system fills new pages with zeros and leaves existing ones alone (MADV_POPULATE_WRITE, Linux 5.14).
Without it nothing is done. The thread ends with the main one, which waits for that: a daemon would
hold on to modules that are to be unloaded.
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
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.host.pages import populate
from quire.ops.rows.row_arrays import last_writes

PIECE_BYTES = 4 << 20
REST = 3  # times as long as a piece took


class MemoryAhead:
    """Has the memory of a tensor's blocks handed out, so many bytes ahead of the last block that
    was used. dim: counts the blocks, which are used in the order of their numbers at first."""

    def __init__(self, blocks: torch.Tensor, dim: int, ahead_bytes: int) -> None:
        self._blocks, self._dim = blocks, dim
        self._num_blocks = blocks.shape[dim]
        self._num_ahead = max(1, ahead_bytes * self._num_blocks // max(1, blocks.nbytes))
        self._asked = 0  # for all blocks before this one
        self._lock = threading.Lock()  # guards it
        self._has_ended = False

    def use(self, block: int) -> None:
        """Take note that this block is used. From any thread."""
        if block + self._num_ahead // 2 < self._asked or self._asked == self._num_blocks:
            return
        with self._lock:
            first = self._asked
            self._asked = max(first, min(self._num_blocks, block + 1 + self._num_ahead))
            last = self._asked
        if first < last:
            name = "quire-memory"
            threading.Thread(target=self._hand_out, args=(first, last), name=name).start()

    def end(self) -> None:
        self._has_ended = True

    def _hand_out(self, first: int, last: int) -> None:
        """Have these blocks' memory handed out; they are a piece of each of the tensor's parts."""
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


PART_BYTES = 16 << 20  # of what a GPU gathers and sends at once
NUM_SLOTS = 8  # parts on their way at once: as much pinned memory, and as much of the device's
AHEAD_BYTES = 512 << 20  # of host memory, and of a device that is the host, if it is kept ready
LEAST_SLOTS = 2  # of blocks that are larger than a part: states are, of many layers


class HostBlocks:
    """Mirrors of the device's KV tensors. dim: the dimension that counts blocks; num_blocks: how
    many each has, as many as the device if absent. streams: of the device, found if absent.
    part_bytes, num_slots: as PART_BYTES and NUM_SLOTS.

    A mirror counts its blocks in the first dimension, so that each is one piece of memory: there
    it takes few large pages, and is read and written at once.
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
        self._is_kept_ready = False
        self._host_ahead: list[MemoryAhead | None] = [None] * len(device_kv)
        self._device_ahead: list[MemoryAhead | None] = [None] * len(device_kv)
        if streams is None and device_kv:
            streams = streams_of(device_kv[0])
        self._transfers: Transfers | None = None
        if streams is not None:
            largest = max(self.block_bytes(place) for place in range(len(device_kv)))
            slot_bytes = max(part_bytes, largest)
            num_slots = max(LEAST_SLOTS, num_slots * part_bytes // slot_bytes)
            self._transfers = Transfers(streams, slot_bytes, num_slots)

    def keep_ready(self) -> None:
        """Have memory handed out ahead of its use from now on: somebody waits for what is written
        there."""
        self._is_kept_ready = True
        for place, kv in enumerate(self._device_kv):
            if kv.numel() and kv.device.type == "cpu":
                self._device_ahead[place] = self._begin_ahead(kv, self._dim)
            self._mirror(place)

    def swap_out(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks `source` of a device tensor to blocks `destination` of its mirror. Waits only
        if more is on its way than there are slots for."""
        mirror, device = self._mirror(place), self._device_kv[place]
        _note(self._host_ahead[place], destination)
        if self._transfers is None:
            read, write = _blocks_of(device, self._dim), _blocks_of(mirror, 0)
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                write[0, other].reshape(len(read), -1)[...] = read[:, one]
            return
        destination = destination.copy()  # read later
        for part in self._parts(place, len(source)):
            blocks = Blocks(place, device, self._dim, mirror, source[part], destination[part])
            self._transfers.out(blocks)

    def load(self, place: int, source: Int32, destination: Int32) -> None:
        """Copy blocks back: from `source` of the mirror to `destination` of the device tensor.
        Waits for those that are still on their way to `source`."""
        mirror, device = self._mirror(place), self._device_kv[place]
        _note(self._device_ahead[place], destination)
        if self._transfers is None:
            read, write = _blocks_of(mirror, 0), _blocks_of(device, self._dim)
            for one, other in zip(source.tolist(), destination.tolist(), strict=True):
                write[:, other] = read[0, one].reshape(len(write), -1)
            return
        last = last_writes(destination)
        source, destination = source[last], destination[last]
        for part in self._parts(place, len(source)):
            blocks = Blocks(place, device, self._dim, mirror, destination[part], source[part])
            self._transfers.into(blocks)

    def give_back(self) -> None:
        """Return all memory of blocks to the system; what they held is lost."""
        if self._transfers is not None:
            self._transfers.wait()
        with self._lock:
            for ahead in self._host_ahead:
                if ahead is not None:
                    ahead.end()
            self._host_kv = [None] * len(self._device_kv)
            self._host_ahead = [None] * len(self._device_kv)

    def block_bytes(self, place: int) -> int:
        """Return the bytes of one block of a device tensor."""
        kv = self._device_kv[place]
        return kv.numel() // kv.shape[self._dim] * kv.element_size()

    def regions(self) -> list[tuple[int, int]]:
        """Return address and bytes of each mirror, all of which are made."""
        mirrors = [self._mirror(place) for place in range(len(self._device_kv))]
        return [(mirror.data_ptr(), mirror.nbytes) for mirror in mirrors]

    def address(self, place: int, block: int) -> int:
        """Return where a block of a mirror begins."""
        return self._mirror(place).data_ptr() + block * self.block_bytes(place)

    def read(self, place: int, block: int) -> memoryview:
        """Return a copy of a block of a mirror: all of the device's bytes at its index, in C order.
        From any thread."""
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
        target, ahead = self._settled_block(place, block), self._host_ahead[place]
        if ahead is not None:
            ahead.use(block)
        target[...] = values.view(target.dtype).reshape(target.shape)

    def _settled_block(self, place: int, block: int) -> npt.NDArray[np.integer]:
        """Return a view of a block of a mirror, after what was on its way there has come. Copied by
        numpy: torch would start a second pool of threads for the thread that asks."""
        if self._transfers is not None:
            self._transfers.wait_for(place, np.array([block], np.int32))
        found: npt.NDArray[np.integer] = as_numpy(self._mirror(place))[block]
        return found

    def _parts(self, place: int, num_blocks: int) -> Iterator[slice]:
        """Cut a move into parts of as many blocks as fit a slot."""
        size = max(1, self._part_bytes // max(1, self.block_bytes(place)))
        return (slice(start, start + size) for start in range(0, num_blocks, size))

    def _mirror(self, place: int) -> torch.Tensor:
        """Make a mirror, or return the one that is there. Whoever comes first, perhaps a store,
        makes it."""
        with self._lock:
            mirror = self._host_kv[place]
            if mirror is None:
                like = self._device_kv[place]
                rest = like.shape[: self._dim] + like.shape[self._dim + 1 :]
                shape = (self._num_blocks[place], *rest)
                mirror = lazy_zeros(shape, like.dtype, torch.device("cpu"))
                self._host_kv[place] = mirror
                if self._is_kept_ready and mirror.numel():
                    self._host_ahead[place] = self._begin_ahead(mirror, 0)
        return mirror

    def _begin_ahead(self, blocks: torch.Tensor, dim: int) -> MemoryAhead:
        ahead = MemoryAhead(blocks, dim, AHEAD_BYTES // len(self._device_kv))
        ahead.use(-1)
        return ahead


def _blocks_of(kv: torch.Tensor, dim: int) -> npt.NDArray[np.integer]:
    """View a tensor as [parts, blocks, numbers], the numbers as wide as they fit. numpy copies them
    on the thread that asks; torch would start all others for each block, and wait for them."""
    parts, num_blocks = math.prod(kv.shape[:dim]), kv.shape[dim]
    values = kv.view(torch.uint8).view(parts, num_blocks, -1).numpy()
    return values.view(np.uint64 if values.shape[-1] % 8 == 0 else np.uint8)


def _note(ahead: MemoryAhead | None, blocks: Int32) -> None:
    """Take note that blocks are written."""
    if ahead is not None and len(blocks):
        ahead.use(int(blocks.max()))
