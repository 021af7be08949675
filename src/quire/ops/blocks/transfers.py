"""Moves of blocks between a GPU's KV tensors and the host's mirrors, alongside the steps.

They use a ring of slots. A slot is a pinned buffer and a device's staging buffer of the same size:

    out     kv -gather-> staging | -copy-> pinned | -> mirror
            compute stream       | stream `out`   | helper thread
    into    mirror -> pinned | -copy-> staging | -scatter-> kv
            this thread      | stream `into`   | compute stream

So the compute stream may overwrite an outgoing block right after its gather. The host waits only
for blocks that it must read and that have not arrived, and for the oldest slot if all are in use. A
slot is rewritten only after its last use has ended. `use.done` signals this to the host, for the
pinned buffer and, after `out`, for both buffers. The compute stream reads the staging buffer of
`into` later. So the stream `into` waits for `scattered`, and the compute stream is in order.

Mirrors are not pinned: they are as large as the pool, tens of gigabytes. Pinning takes all of that
from the system at once, and seconds per ten gigabytes. A slot costs one more copy in host memory.
For outgoing blocks the helper thread makes it. Incoming blocks are needed by the step that is about
to be launched.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.blocks.block_moves import gather_blocks, scatter_blocks
from quire.ops.blocks.streams import Int32, Mark, Stream, Streams

# By bytes per element. numpy lacks some of torch's types, and copies do not need them.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Blocks:
    """Blocks of a device tensor and of its mirror. tensor_index: index of the tensor. dim:
    dimension of kv that counts blocks; the mirror's is 0. on_device, on_host: equally many block
    ids."""

    tensor_index: int
    kv: torch.Tensor
    dim: int
    mirror: torch.Tensor
    on_device: Int32
    on_host: Int32


@dataclass(frozen=True)
class _Use:
    """Use of a slot. done: when its pinned buffer is free, and blocks `on_host` have arrived."""

    done: Mark
    tensor_index: int = -1
    on_host: Int32 = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass
class _Slot:
    """Pair of buffers. scattered: mark after the compute stream's last read of `staging`."""

    pinned: torch.Tensor
    staging: torch.Tensor
    scattered: Mark
    use: _Use | None = None


class Transfers:
    """Ring of slots for moves. Only the thread that launches steps calls `out` and `into`; any
    thread may call the rest. slot_bytes: size of each slot, the maximum of a move. The first move
    allocates all slots."""

    def __init__(self, streams: Streams, slot_bytes: int, num_slots: int) -> None:
        self._streams = streams
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._slots: list[_Slot] = []
        self._oldest = 0

    def out(self, blocks: Blocks) -> None:
        """Copy device blocks to the mirror, with the values at this point of the compute stream."""
        streams, slot = self._streams, self._take_slot()
        staged, pinned = (_buffer(each, blocks) for each in (slot.staging, slot.pinned))
        ids_N = streams.ids(blocks.on_device)
        streams.compute.run(lambda: gather_blocks(blocks.kv, ids_N, blocks.dim, staged))
        _copy_after(streams.out, streams.compute.mark(), pinned, staged)
        sent = streams.out.mark()
        done = streams.run_task(lambda: _settle(sent, blocks, pinned))
        slot.use = _Use(done, blocks.tensor_index, blocks.on_host)

    def into(self, blocks: Blocks) -> None:
        """Copy distinct blocks of the mirror to the device, before later work of
        `streams.compute`."""
        self.wait_for(blocks.tensor_index, blocks.on_host)
        streams, slot = self._streams, self._take_slot()
        staged, pinned = (_buffer(each, blocks) for each in (slot.staging, slot.pinned))
        read = torch.tensor(blocks.on_host, dtype=torch.int64)
        torch.index_select(blocks.mirror, 0, read, out=pinned)
        _copy_after(streams.into, slot.scattered, staged, pinned)
        arrived = streams.into.mark()
        slot.use = _Use(arrived)
        ids_N = streams.ids(blocks.on_device)
        streams.compute.wait_for(arrived)
        streams.compute.run(lambda: scatter_blocks(blocks.kv, ids_N, blocks.dim, staged))
        slot.scattered = streams.compute.mark()

    def wait_for(self, tensor_index: int, on_host: Int32) -> None:
        """Wait until no move to these blocks of a mirror is in transit."""
        for slot in tuple(self._slots):
            use = slot.use
            if use is None or use.tensor_index != tensor_index:
                continue
            # Waiting for an ended move raises its error, if it failed.
            if use.done.is_done() or np.isin(on_host, use.on_host).any():
                use.done.wait()

    def wait(self) -> None:
        """Wait until no move is in transit."""
        for slot in tuple(self._slots):
            if slot.use is not None:
                slot.use.done.wait()

    def _take_slot(self) -> _Slot:
        """Return the least recently used slot once it is free; its last use stays visible to other
        threads."""
        if not self._slots:
            start = self._streams.compute.mark()
            self._slots = [
                _Slot(*self._streams.buffers(self._slot_bytes), start)
                for _ in range(self._num_slots)
            ]
        slot = self._slots[self._oldest]
        self._oldest = (self._oldest + 1) % self._num_slots
        if slot.use is not None:
            slot.use.done.wait()
        return slot


def _copy_after(stream: Stream, mark: Mark, target: torch.Tensor, source: torch.Tensor) -> None:
    stream.wait_for(mark)
    stream.run(lambda: target.copy_(source, non_blocking=True))


def _buffer(whole: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the first bytes of a buffer as blocks, [N, ...]."""
    shape = (len(blocks.on_host), *blocks.mirror.shape[1:])
    num_bytes = len(blocks.on_host) * blocks.mirror[0].nbytes
    return whole[:num_bytes].view(blocks.mirror.dtype).view(shape)


def _settle(sent: Mark, blocks: Blocks, pinned: torch.Tensor) -> None:
    """Copy blocks that have arrived in pinned memory to the mirror. numpy releases Python's lock;
    torch would start a pool of threads for this thread."""
    sent.wait()
    to, from_ = as_numpy(blocks.mirror), as_numpy(pinned)
    for index, block in enumerate(blocks.on_host.tolist()):
        to[block] = from_[index]


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[np.integer]:
    """Return a tensor [...] as an array of integers of the same size, in the same memory."""
    values: npt.NDArray[np.integer] = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    return values
