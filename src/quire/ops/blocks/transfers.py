"""Moves of blocks between a GPU's KV tensors and the host's mirrors, beside the steps.

A ring of slots, each a pinned buffer and a staging buffer of the device of the same size:

    out     kv -gather-> staging | -copy-> pinned | -> mirror
            compute stream       | stream `out`   | helper thread
    into    mirror -> pinned | -copy-> staging | -scatter-> kv
            this thread      | stream `into`   | compute stream

So a block that goes out may be overwritten by whatever the compute stream does next, and the host
waits only for blocks that it must read and that have not arrived, and for the oldest slot if all of
them are in use. A slot is rewritten only after what used it is over. `use.done` says so to the
host, of the pinned buffer, and if blocks went out of both buffers. A staging buffer from which
blocks came in is read by the compute stream later: the stream `into` waits for `scattered`, and the
compute stream's own work is in order.

Why pinned slots instead of pinned mirrors: mirrors are as large as the pool, tens of gigabytes,
and pinning takes all of that from the system at once, at seconds for each ten gigabytes. A slot
costs a copy in the host's memory: for blocks that go out the helper thread makes it, those
that come in are needed by the step that is about to be launched.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.blocks.block_moves import gather_blocks, scatter_blocks
from quire.ops.blocks.streams import Int32, Mark, Stream, Streams

# By bytes per element; numpy does not know all of torch's types, and copies need not.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Blocks:
    """Blocks of a device's tensor and of its mirror. place: which tensor it is; dim: counts blocks
    of kv, those of the mirror stand in its first dimension; on_device, on_host: ids of as many."""

    place: int
    kv: torch.Tensor
    dim: int
    mirror: torch.Tensor
    on_device: Int32
    on_host: Int32


@dataclass(frozen=True)
class _Use:
    """done: the pinned buffer may be rewritten, and blocks `on_host` of the mirror have come."""

    done: Mark
    place: int = -1
    on_host: Int32 = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass
class _Slot:
    """scattered: behind the compute stream's last read of the staging buffer."""

    pinned: torch.Tensor
    staging: torch.Tensor
    scattered: Mark
    use: _Use | None = None


class Transfers:
    """`out` and `into` are for the thread that launches steps, the rest for any.

    slot_bytes: of each of num_slots, which are taken with the first move; no move is larger.
    """

    def __init__(self, streams: Streams, slot_bytes: int, num_slots: int) -> None:
        self._streams = streams
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._slots: list[_Slot] = []
        self._oldest = 0

    def out(self, blocks: Blocks) -> None:
        """Copy blocks of the device to the mirror, in the state that the compute stream leaves."""
        streams, slot = self._streams, self._take_slot()
        staged, pinned = (_buffer(each, blocks) for each in (slot.staging, slot.pinned))
        ids_N = streams.ids(blocks.on_device)
        streams.compute.run(lambda: gather_blocks(blocks.kv, ids_N, blocks.dim, staged))
        _copy_after(streams.out, streams.compute.mark(), pinned, staged)
        sent = streams.out.mark()
        done = streams.beside(lambda: _settle(sent, blocks, pinned))
        slot.use = _Use(done, blocks.place, blocks.on_host)

    def into(self, blocks: Blocks) -> None:
        """Copy blocks of the mirror to the device, none of them twice, before what the compute
        stream does next."""
        self.wait_for(blocks.place, blocks.on_host)
        streams, slot = self._streams, self._take_slot()
        staged, pinned = (_buffer(each, blocks) for each in (slot.staging, slot.pinned))
        read = torch.tensor(blocks.on_host, dtype=torch.int64)
        torch.index_select(blocks.mirror, 0, read, out=pinned)
        _copy_after(streams.into, slot.scattered, staged, pinned)
        came = streams.into.mark()
        slot.use = _Use(came)
        ids_N = streams.ids(blocks.on_device)
        streams.compute.wait_for(came)
        streams.compute.run(lambda: scatter_blocks(blocks.kv, ids_N, blocks.dim, staged))
        slot.scattered = streams.compute.mark()

    def wait_for(self, place: int, on_host: Int32) -> None:
        """Wait until nothing is on its way to these blocks of a mirror."""
        for slot in tuple(self._slots):
            use = slot.use
            if use is None or use.place != place:
                continue
            # What has ended is waited for, too: it may have failed.
            if use.done.is_done() or np.isin(on_host, use.on_host).any():
                use.done.wait()

    def wait(self) -> None:
        """Wait until nothing is on its way."""
        for slot in tuple(self._slots):
            if slot.use is not None:
                slot.use.done.wait()

    def _take_slot(self) -> _Slot:
        """Take the slot that was taken longest ago; while another thread asks, it keeps its last
        use."""
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
    """Put blocks that have crossed into their places. By numpy, which lets go of Python's lock:
    torch would start a pool of threads for this one."""
    sent.wait()
    to, from_ = as_numpy(blocks.mirror), as_numpy(pinned)
    for index, block in enumerate(blocks.on_host.tolist()):
        to[block] = from_[index]


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[np.integer]:
    """Return the same memory as integers of the same size."""
    values: npt.NDArray[np.integer] = tensor.view(INTEGERS[tensor.element_size()]).numpy()
    return values
