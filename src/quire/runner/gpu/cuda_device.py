"""A CUDA device: work is queued on one stream; results are copied to the host on another."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from quire.base.errors import EngineError
from quire.runner.device import Arrival, Graph, StepClock, Tensors, Work

DRIVER = "libcuda.so.1"  # the library that torch has opened


class _Crossing:
    """Results on their way to the host, on the side stream."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        marks: tuple[torch.cuda.Event, ...],
        end: torch.cuda.Event,
        clock: StepClock | None = None,
    ) -> None:
        self._tensors, self._marks, self._end, self._clock = tensors, marks, end, clock

    def is_done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> list[torch.Tensor]:
        self._end.synchronize()
        clock, self._clock = self._clock, None
        if clock is not None:  # later waits come after the end
            clock.end()
        return self._tensors

    def duration_s(self) -> float:
        begin, end = self._marks
        return float(begin.elapsed_time(end)) / 1000


class CudaDevice:
    """One stream for work, another for copies to the host, and one memory pool for graphs.

    forbids_waiting: raise if work makes the host wait for the device (torch's own check). It
    detects copies to the host, `.item()` and similar calls. Use it to find mistakes, not for
    serving: it applies to the whole process while work is launched.
    """

    is_async = True
    can_capture = True
    driver = DRIVER

    def __init__(self, device: torch.device, *, forbids_waiting: bool = False) -> None:
        self.device = device
        self.clock = StepClock()
        self._stream = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._forbids_waiting = forbids_waiting

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def run(self, work: Work) -> Arrival:
        begin, end = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        self._follow_thread()
        with torch.cuda.stream(self._stream), self._watched():
            begin.record(self._stream)
            tensors = work()
            end.record(self._stream)
        if not tensors:
            return _Crossing([], (begin, end), end)
        try:
            return self._sent(tensors, begin, end)
        except Exception as error:  # launched work cannot be launched again
            raise EngineError(f"a step's results cannot be sent to the host: {error}") from error

    @property
    def stream_address(self) -> int:
        """See LaunchingDevice. Raises RuntimeError if torch does not give addresses of graphs."""
        if "raw_cuda_graph_exec" not in dir(torch.cuda.CUDAGraph):
            raise RuntimeError(f"torch {torch.__version__} gives no addresses of graphs")
        return int(self._stream.cuda_stream)

    def graph_address(self, graph: Graph) -> int:
        """See LaunchingDevice."""
        assert isinstance(graph, torch.cuda.CUDAGraph)
        return int(graph.raw_cuda_graph_exec())

    def claim_thread(self) -> None:
        """See LaunchingDevice. The thread's own work goes to this stream from now on, so that steps
        need no event to follow it."""
        if self._follow_thread():
            torch.cuda.set_stream(self._stream)

    def _follow_thread(self) -> bool:
        """Let the stream wait for earlier launches of this thread elsewhere, such as zeros for new
        memory. Return whether the thread uses another stream."""
        current = torch.cuda.current_stream(self.device)
        if current == self._stream:
            return False
        self._stream.wait_stream(current)
        return True

    def _sent(self, tensors: Tensors, begin: torch.cuda.Event, end: torch.cuda.Event) -> _Crossing:
        arrived = torch.cuda.Event(blocking=True)
        self._side.wait_event(end)
        with torch.cuda.stream(self._side):
            here = [self._send(tensor) for tensor in tensors]
            arrived.record(self._side)
        return _Crossing(here, (begin, end), arrived, self.clock)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send values to the host: only this function copies from the device. Torch owns the pinned
        memory, keeps it until the copy is done, and then reuses it."""
        here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        here.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return here

    def begin_capture(self) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for events meanwhile; that does not concern this graph.
        with self._restored_allocator():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph

    def end_capture(self, graph: Graph) -> None:
        assert isinstance(graph, torch.cuda.CUDAGraph)
        with self._restored_allocator():
            graph.capture_end()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.as_tensor(_TensorAddress(tensor), device=tensor.device)
        return found.view(tensor.dtype)

    @contextmanager
    def _restored_allocator(self) -> Iterator[None]:
        """Restore torch's allocator after an error. If CUDA fails to begin or end a capture, it
        stays in its recording state (CUDAGraph.cpp), and crossing memory would never be reused."""
        try:
            yield
        except BaseException:
            index = self._stream.device.index
            with suppress(RuntimeError, AttributeError):  # the allocator was not recording
                torch._C._cuda_endAllocateToPool(index, self._pool)
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


class _TensorAddress:
    """Address of a tensor's values; an array made from it does not keep them alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": "|u1" if size == 1 else f"<i{size}",
            "data": (tensor.data_ptr(), False),
        }
