"""Device interfaces of block moves: streams, marks in them, and memory that both sides reach.

The moves (transfers.py) use these interfaces, so that tests can do the work in any order that a GPU
might choose. The production implementation is CUDA's.
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
    """Point in a stream's work, or the end of a task of the helper thread."""

    def is_done(self) -> bool:
        """Return whether all work before the mark is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Block this thread until all work before the mark is done. Raises the task's error."""
        ...


class Stream(Protocol):
    """Queue of work on a device, done in order."""

    def run(self, launch: Callable[[], object]) -> None:
        """Launch work that follows all earlier work of this stream."""
        ...

    def mark(self) -> Mark:
        """Return a mark after all work launched so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Delay all later work of this stream until a stream's mark. The host does not wait."""
        ...


class Streams(Protocol):
    """A device's streams: for the steps, and alongside them for copies to and from the host."""

    compute: Stream
    out: Stream
    into: Stream

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate pinned host bytes, and as many device bytes that `compute` may use."""
        ...

    def ids(self, blocks: Int32) -> torch.Tensor:
        """Return block ids [N] as a tensor for work on the compute stream."""
        ...

    def run_task(self, task: Callable[[], None]) -> Mark:
        """Run a task on the helper thread, after its earlier tasks; return its end as a mark."""
        ...


class CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        """See Mark."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Mark. Other Python threads run meanwhile."""
        self.event.synchronize()


class CudaStream:
    """CUDA stream; None stands for the stream that is current at each launch."""

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
        """See Stream. A thread that waits for the mark sleeps, instead of using a core."""
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
    """CUDA's streams. The helper thread starts with its first task and ends with this object."""

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
            staging.record_stream(stream)  # no reuse while a copy still uses it
        return pinned, staging

    def ids(self, blocks: Int32) -> torch.Tensor:
        """See Streams."""
        return device_ids(blocks, self._device)

    def run_task(self, task: Callable[[], None]) -> Mark:
        """See Streams."""
        return TaskMark(self._thread.submit(task))


def streams_of(tensor: torch.Tensor) -> Streams | None:
    """Return the streams of the device of a tensor [...]; None if that is the host."""
    return CudaStreams(tensor.device) if tensor.is_cuda else None


def device_ids(blocks: Int32, device: torch.device) -> torch.Tensor:
    """Copy block ids of any shape to a device, as int32; a GPU's host does not wait."""
    return to_device(np.array(blocks, np.int32), device)
