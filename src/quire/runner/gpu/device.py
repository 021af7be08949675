"""What the runner needs of a GPU beside tensors: an order of work, ways to the host, graphs.

All work is done in one order. `run` puts a piece of it at the end, and says what of its results
the host wants; these cross beside the work that follows, and are there when the arrival is done.
Nothing else comes back: with `forbids_waiting` whatever would make the host wait raises.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from quire.base.errors import EngineError

Tensors = Sequence[torch.Tensor]
Work = Callable[[], Tensors]


class Arrival(Protocol):
    """What a piece of work sent to the host."""

    def is_done(self) -> bool: ...

    def wait(self) -> list[torch.Tensor]:
        """The values, on the host, in the order in which the work returned them."""
        ...

    def duration_s(self) -> float:
        """How long the device worked on it; after `wait`."""
        ...


class Graph(Protocol):
    """Recorded work. replay: put it at the end of the order, on the memory it was recorded with."""

    def replay(self) -> None: ...


class Device(Protocol):
    """can_capture: whether work can be recorded."""

    device: torch.device
    can_capture: bool

    def pinned(self, num_words: int) -> torch.Tensor:
        """int32 memory of the host that the device reads."""
        ...

    def run(self, work: Work) -> Arrival:
        """Do this after all that was given before; returns before it is done. Raises what the work
        raises, and EngineError where it was launched but its results cannot come back."""
        ...

    def begin_capture(self) -> Graph:
        """Within `run`: from here on work is recorded, and not done."""
        ...

    def end_capture(self, graph: Graph) -> None: ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values at the same place, which graphs keep and the result does not: other
        recordings may use it, too."""
        ...


class _Here:
    """Values that are here already."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[torch.Tensor]:
        return self._tensors

    def duration_s(self) -> float:
        return 0.0


class HostDevice:
    """A CPU in a GPU's place, for Triton's interpreter: all is done at once."""

    can_capture = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def run(self, work: Work) -> Arrival:
        return _Here(work())

    def begin_capture(self) -> Graph:
        raise NotImplementedError("a CPU records no graphs")

    def end_capture(self, graph: Graph) -> None:
        raise NotImplementedError("a CPU records no graphs")

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class _Crossing:
    """Copies on their way, on the side stream."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        marks: tuple[torch.cuda.Event, ...],
        end: torch.cuda.Event,
    ) -> None:
        self._tensors, self._marks, self._end = tensors, marks, end

    def is_done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> list[torch.Tensor]:
        self._end.synchronize()
        return self._tensors

    def duration_s(self) -> float:
        begin, end = self._marks
        return float(begin.elapsed_time(end)) / 1000


class CudaDevice:
    """A stream for the work, one beside it for what crosses, and one pool of memory for graphs.

    forbids_waiting: raise where work makes the host wait for the device (torch's own check). It
    sees copies to the host, `.item()` and the like; for finding mistakes, not for serving, since it
    holds for the whole process while work is given.
    """

    can_capture = True

    def __init__(self, device: torch.device, *, forbids_waiting: bool = False) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forbids_waiting = forbids_waiting

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> Arrival:
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        # What this thread launched elsewhere, such as zeros for new memory, comes before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream), self._watched():
            begin.record(self._stream)
            tensors = work()
            end.record(self._stream)
        if not tensors:
            return _Crossing([], (begin, end), end)
        try:
            return self._sent(tensors, begin, end)
        except Exception as error:  # what was launched cannot be launched again
            raise EngineError(f"a step's results cannot be sent to the host: {error}") from error

    def _sent(self, tensors: Tensors, begin: torch.cuda.Event, end: torch.cuda.Event) -> _Crossing:
        arrived = torch.cuda.Event(blocking=True)
        self._side.wait_event(end)
        with torch.cuda.stream(self._side):
            here = [self._send(tensor) for tensor in tensors]
            arrived.record(self._side)
        return _Crossing(here, (begin, end), arrived)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one place where values leave the device. Pinned memory is torch's, which keeps it
        until the copy is done, and gives it out again."""
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        here.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return here

    def begin_capture(self) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for events meanwhile: what they do is none of this graph's business.
        with self._allocator_put_right():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def end_capture(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        with self._allocator_put_right():
            graph.capture_end()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.as_tensor(_Place(tensor), device=tensor.device)
        return found.view(tensor.dtype)

    @contextmanager
    def _allocator_put_right(self) -> Iterator[None]:
        """torch leaves its allocator as it is while recording if CUDA does not begin or end that
        (CUDAGraph.cpp): memory that crossed to another stream would never be used again."""
        try:
            yield
        except BaseException:
            index = self._stream.device.index
            with suppress(RuntimeError, AttributeError):  # it was put right
                torch._C._cuda_endAllocateToPool(index, self._pool)  # type: ignore[attr-defined]
            raise

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if not self._forbids_waiting:
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Place:
    """Where a tensor's values are; whoever reads it there does not keep them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "data": (tensor.data_ptr(), False),
        }


def make_device(device: torch.device, *, forbids_waiting: bool = False) -> Device:
    """For a torch device; a CPU takes the GPU's place under Triton's interpreter."""
    if device.type == "cuda":
        return CudaDevice(device, forbids_waiting=forbids_waiting)
    return HostDevice(device)
