"""What moves of blocks need of a device: streams, points in them, and memory that both sides reach.

The moves (transfers.py) are written against these interfaces, so that tests can carry the work out
in any order that a GPU might take. The real ones are CUDA's.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.host_memory import to_device

Int32 = npt.NDArray[np.int32]


class Mark(Protocol):
    """A point in a stream's work, or the end of a task of the helper thread."""

    def is_done(self) -> bool:
        """Tell whether all before it is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Hold this thread until all before it is done. Raises what a task raised."""
        ...


class Stream(Protocol):
    """Work of a device in one order."""

    def run(self, launch: Callable[[], object]) -> None:
        """Launch work that follows what was launched here before."""
        ...

    def mark(self) -> Mark:
        """The point behind all that was launched so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Hold what is launched here from now on until a stream's mark. The host goes on."""
        ...


class Streams(Protocol):
    """A device's streams: of the steps, and for copies to the host and from it beside them."""

    compute: Stream
    out: Stream
    into: Stream

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes of pinned host memory, and as many of the device's, free on its compute stream."""
        ...

    def ids(self, blocks: Int32) -> torch.Tensor:
        """Block ids for work on the compute stream."""
        ...

    def beside(self, task: Callable[[], None]) -> Mark:
        """Do tasks one after the other on a thread of their own."""
        ...


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """See Mark."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Mark. Other threads of Python run meanwhile."""
        self.event.synchronize()


class CudaStream:
    """stream: that one, or whichever is the current one when something is launched."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream(self._device)

    def run(self, launch: Callable[[], object]) -> None:
        """See Stream."""
        with torch.cuda.stream(self._stream):  # None changes nothing
            launch()

    def mark(self) -> CudaMark:
        """See Stream. A thread that waits for it sleeps, instead of taking a core."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        """See Stream."""
        assert isinstance(mark, CudaMark), "streams wait for marks of streams"
        self.stream.wait_event(mark.event)


class TaskMark:
    def __init__(self, task: "Future[None]") -> None:
        self._task = task

    def is_done(self) -> bool:
        """See Mark."""
        return self._task.done()

    def wait(self) -> None:
        """See Mark."""
        self._task.result()


class CudaStreams:
    """The helper thread begins with its first task, and ends when this object does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sides = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-blocks")
        self.compute: Stream = CudaStream(device)
        self.out: Stream = CudaStream(device, self._sides[0])
        self.into: Stream = CudaStream(device, self._sides[1])

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See Streams."""
        pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for stream in self._sides:
            staging.record_stream(stream)  # it is not given away while a copy still uses it
        return pinned, staging

    def ids(self, blocks: Int32) -> torch.Tensor:
        """See Streams."""
        return device_ids(blocks, self._device)

    def beside(self, task: Callable[[], None]) -> Mark:
        """See Streams."""
        return TaskMark(self._thread.submit(task))


def streams_of(tensor: torch.Tensor) -> Streams | None:
    """Return the streams of a tensor's device; None if that is the host."""
    return CudaStreams(tensor.device) if tensor.is_cuda else None


def device_ids(blocks: Int32, device: torch.device) -> torch.Tensor:
    """Block ids of any shape on a device, as int32; a GPU's host does not wait for them."""
    return to_device(np.array(blocks, np.int32), device)
