"""The interface of a device to the runner: a queue of work, transfers to the host, and graphs.

A device executes work in the order of the calls of `run`. The tensors that the work returns are
copied to the host; an `Arrival` reports when they are there. A CPU runs the work at once. A GPU
queues it (`gpu/cuda_device.py`) and copies results while later work runs. A start without torch
uses numpy arrays instead of tensors (`warm/`).
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

Tensors = Sequence["torch.Tensor"]
Work = Callable[[], Tensors]


class Arrival(Protocol):
    """Results of one `Device.run` on their way to the host."""

    def is_done(self) -> bool: ...

    def wait(self) -> "list[torch.Tensor]":
        """Wait for the results; return them on the host, in the order in which the work returned
        them."""
        ...

    def duration_s(self) -> float:
        """Return the device's time for the work in seconds. Call it after `wait`."""
        ...


class StepClock:
    """Durations of steps without timed events, as the host sees them. A step begins with its
    launch, or with the end of the step before if that is later."""

    def __init__(self) -> None:
        self._ended_s = 0.0

    def end(self, launched_s: float = 0.0) -> float:
        """Note the end of a step; return its duration in seconds."""
        before, self._ended_s = self._ended_s, time.perf_counter()
        return self._ended_s - max(before, launched_s)


class Graph(Protocol):
    """Recorded work. replay: queue the work again, on the same memory as in the recording."""

    def replay(self) -> None: ...


class Device(Protocol):
    """Queue of work on a device. is_async: whether `run` returns before the work is done.
    can_capture: whether the device records graphs."""

    device: "torch.device"
    is_async: bool
    can_capture: bool

    def pinned(self, num_words: int) -> "torch.Tensor":
        """Return host memory that the device can read, [num_words] int32."""
        ...

    def run(self, work: Work) -> Arrival:
        """Run this work after all earlier work. Raises the work's own errors, and EngineError if
        the results of launched work cannot be copied to the host."""
        ...

    def begin_capture(self) -> Graph:
        """Begin to record a graph. Call it within `run`; later work is recorded, not executed."""
        ...

    def end_capture(self, graph: Graph) -> None: ...

    def borrow(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return a view [*shape] of the tensor that does not keep its memory alive. The
        graphs own that memory, so that other recordings may reuse it."""
        ...


class _HostArrival:
    """Arrival whose values are already on the host."""

    def __init__(self, values: "list[torch.Tensor]", began: float) -> None:
        self._values = values
        self._duration_s = time.perf_counter() - began

    def is_done(self) -> bool:
        return True

    def wait(self) -> "list[torch.Tensor]":
        return self._values

    def duration_s(self) -> float:
        return self._duration_s


def _own(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the tensor, or a copy if it is a view of larger memory, which later work may reuse."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class HostDevice:
    """CPU device, which runs work at once.
    own: copies a result if it is a view of reused memory."""

    is_async = False
    can_capture = False

    def __init__(self, device: Any, own: Callable[[Any], Any] = _own) -> None:
        self.device, self._own = device, own

    def pinned(self, num_words: int) -> "torch.Tensor":
        import torch

        return torch.zeros(num_words, dtype=torch.int32)

    def run(self, work: Work) -> Arrival:
        began = time.perf_counter()
        return _HostArrival([self._own(tensor) for tensor in work()], began)

    def begin_capture(self) -> Graph:
        raise NotImplementedError("a CPU does not record graphs")

    def end_capture(self, graph: Graph) -> None:
        raise NotImplementedError("a CPU does not record graphs")

    def borrow(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor
