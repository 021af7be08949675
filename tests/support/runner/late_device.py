"""A CPU that behaves as a GPU does: it works as late as possible, long after the launch, and
replays.

Work is kept until a caller waits for it or for later work. So tokens are wrong here if a slot is
overwritten too early, or if a launch reads the host when it runs. Recorded work is a list of calls
of torch and Triton's interpreter. A replay repeats them with the same arguments, on the same
memory.

`stand_in` puts it, or another, into a GPU's place: operations believe that they are on a GPU.
Reference computations run `on_the_host`, by torch's operations.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from quire.ops import gpu
from quire.ops.blocks import host_blocks
from quire.ops.host import native
from quire.runner.device import HostDevice
from quire.runner.setup import assemble

Call = Callable[[], None]


class _Recorder(TorchDispatchMode):
    """Notes what changes memory, while it is done."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if any(each.alias_info and each.alias_info.is_write for each in returns):
            self._calls.append(lambda: func(*args, **kwargs))
        elif "empty" not in func.__name__ and not memory(result) & memory([args, kwargs]):
            self._calls.append(lambda: _again(func, args, kwargs, result))
        return result


def memory(values: Any) -> set[int]:
    """Where the tensors among these values are."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    plain = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in plain}


def _again(func, args, kwargs, result) -> None:
    """What is made anew goes where it was before."""
    new = func(*args, **kwargs)
    pairs = zip(new, result, strict=True) if isinstance(new, tuple | list) else [(new, result)]
    for value, place in pairs:
        if isinstance(place, torch.Tensor):
            place.copy_(value)


class RecordedCalls:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for call in self.calls:
            call()


class _Late:
    """Values that exist once the device has come so far."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.values: list[torch.Tensor] | None = None

    def is_done(self) -> bool:
        return self.values is not None

    def wait(self) -> list[torch.Tensor]:
        self._device.work_until(self)
        assert self.values is not None
        return self.values

    def duration_s(self) -> float:
        return 0.001


READING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__index__")


@contextmanager
def no_reading() -> Iterator[None]:
    """Raise where work asks for a value, which would make the host wait for a GPU; but within the
    interpreter, which plays the GPU, and where blocks move, as a GPU does by itself."""
    is_kernel, here = [False], threading.get_ident()

    def freely(execute):
        def launch(*args, **kwargs):
            is_kernel[0] = True
            try:
                return execute(*args, **kwargs)
            finally:
                is_kernel[0] = False

        return launch

    def guarded(name):
        read = getattr(torch.Tensor, name)

        def checked(tensor, *args, **kwargs):
            is_free = is_kernel[0] or threading.get_ident() != here
            assert is_free, f"the host waits for the device: {name}"
            return read(tensor, *args, **kwargs)

        return mock.patch.object(torch.Tensor, name, checked)

    with ExitStack() as stack:
        for place, name in ((interpreter.GridExecutor, "__call__"), (host_blocks, "_blocks_of")):
            free = freely(getattr(place, name))
            stack.enter_context(mock.patch.object(place, name, free))
        for name in READING:
            stack.enter_context(guarded(name))
        yield


class LateDevice:
    """A `runner.device.Device`."""

    is_async = True
    can_capture = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: list[RecordedCalls] = []
        self.most_waiting = 0
        self._told: deque[tuple[Any, _Late]] = deque()
        self._lock = threading.RLock()
        self._recording: list[Any] = []

    def pinned(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), 12345, dtype=torch.int32)

    def run(self, work) -> _Late:
        arrival = _Late(self)
        self._told.append((work, arrival))
        self.most_waiting = max(self.most_waiting, len(self._told))
        return arrival

    def work_until(self, arrival: _Late) -> None:
        with self._lock, torch.inference_mode(), no_reading():
            while not arrival.is_done():
                work, its = self._told.popleft()
                its.values = [tensor.clone() for tensor in work()]

    def begin_capture(self) -> RecordedCalls:
        graph = RecordedCalls()
        execute = interpreter.GridExecutor.__call__

        def launch(executor, *args, **kwargs):
            with _disable_current_modes():
                execute(executor, *args, **kwargs)
            graph.calls.append(lambda: execute(executor, *args, **kwargs))

        patch = mock.patch.object(interpreter.GridExecutor, "__call__", launch)
        recorder = _Recorder(graph.calls)
        self._recording = [patch, recorder]
        patch.start()
        recorder.__enter__()
        return graph

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # nothing else keeps it here

    def end_capture(self, graph: RecordedCalls) -> None:
        patch, recorder = self._recording
        recorder.__exit__(None, None, None)
        patch.stop()
        self.graphs.append(graph)


class _Place:
    """Where runners are made, and work."""

    is_host = False


@contextmanager
def on_the_host() -> Iterator[None]:
    """As if no device stood in for a GPU."""
    before, _Place.is_host = _Place.is_host, True
    try:
        yield
    finally:
        _Place.is_host = before


def stand_in(monkeypatch: pytest.MonkeyPatch, make: Callable[[torch.device], Any]) -> None:
    """Runners are made on what this makes, and their operations believe that they are on a GPU."""

    def make_device(device: torch.device, **_: Any) -> Any:
        return HostDevice(device) if _Place.is_host else make(device)

    monkeypatch.setattr(assemble, "make_device", make_device)
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: not _Place.is_host)


@contextmanager
def without_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The C++ core, which a GPU has no use for, is not found."""
    native.core.cache_clear()
    monkeypatch.setattr(native, "INTERFACE_VERSION", -1)
    with pytest.warns(UserWarning, match="it was built from other sources"):
        assert native.core() is None
    yield
    native.core.cache_clear()
