"""What the runner needs of a device beside tensors: an order of work, ways to the host, graphs.

All work is done in one order. `run` puts a piece of it at the end, and says what of its results
the host wants; these are there when the arrival is done. Nothing else comes back. The host does at
once what a GPU queues (`gpu/cuda_device.py`), where results cross beside the work that follows.
A start without torch has arrays of numpy in the place of tensors (`warm/`).
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

Tensors = Sequence["torch.Tensor"]
Work = Callable[[], Tensors]


class Arrival(Protocol):
    """What a piece of work sent to the host."""

    def is_done(self) -> bool: ...

    def wait(self) -> "list[torch.Tensor]":
        """Wait for the values, on the host, in the order in which the work returned them."""
        ...

    def duration_s(self) -> float:
        """Return how long the device worked on it; after `wait`."""
        ...


class Graph(Protocol):
    """Recorded work. replay: put it at the end of the order, on the memory it was recorded with."""

    def replay(self) -> None: ...


class Device(Protocol):
    """is_async: whether `run` returns before the work is done. can_capture: whether work can be
    recorded."""

    device: "torch.device"
    is_async: bool
    can_capture: bool

    def pinned(self, num_words: int) -> "torch.Tensor":
        """Return int32 memory of the host that the device reads."""
        ...

    def run(self, work: Work) -> Arrival:
        """Do this after all that was given before. Raises what the work raises, and EngineError
        where it was launched but its results cannot come back."""
        ...

    def begin_capture(self) -> Graph:
        """Begin to record, within `run`: from here on work is recorded, and not done."""
        ...

    def end_capture(self, graph: Graph) -> None: ...

    def borrow(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Return the same values at the same place, which graphs keep and the result does not:
        other recordings may use it, too."""
        ...


class _Here:
    """Values that are here already."""

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
    """Return the tensor, or a copy of what is a part of memory that is used again."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class HostDevice:
    """A CPU: all is done at once. own: copies what is a part of memory that is used again."""

    is_async = False
    can_capture = False

    def __init__(self, device: Any, own: Callable[[Any], Any] = _own) -> None:
        self.device, self._own = device, own

    def pinned(self, num_words: int) -> "torch.Tensor":
        import torch

        return torch.zeros(num_words, dtype=torch.int32)

    def run(self, work: Work) -> Arrival:
        began = time.perf_counter()
        return _Here([self._own(tensor) for tensor in work()], began)

    def begin_capture(self) -> Graph:
        raise NotImplementedError("a CPU does not record graphs")

    def end_capture(self, graph: Graph) -> None:
        raise NotImplementedError("a CPU does not record graphs")

    def borrow(self, tensor: "torch.Tensor") -> "torch.Tensor":
        return tensor
