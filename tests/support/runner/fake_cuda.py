"""torch.cuda on a CPU: streams, events and graphs that note their calls in `log`.

Work is done at once; only its end is late. An event is done when a caller waits for it or for later
work: in its stream, or in one that waits for its stream. Like CUDA, the fake refuses to record on
the default stream or twice at a time, and to wait while recording. It has no times between events
that are not done. Graphs come from `late_device.py`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runner.late_device import LateDevice

CPU = torch.device("cpu")
Log = list[tuple[Any, ...]]


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name
        self.device = torch.device("cuda", 0)
        self.cuda_stream = 1
        self.events: list[FakeEvent] = []  # recorded here, or waited for here

    def wait_event(self, event: "FakeEvent") -> None:
        self.cuda.log.append((self.name, "waits for", event.stream.name))
        self.events.append(event)

    def wait_stream(self, stream: "FakeStream") -> None:
        event = FakeEvent(self.cuda)
        event.record(stream)
        self.wait_event(event)


class FakeEvent:
    def __init__(self, cuda: "FakeCuda", enable_timing: bool = False, blocking: bool = False):
        self.cuda, self.has_time, self.is_blocking = cuda, enable_timing, blocking
        self.is_done = False

    def record(self, stream: FakeStream) -> None:
        assert stream.name not in self.cuda.capturing, "a recording would take the event"
        self.stream, self.place = stream, len(stream.events)
        stream.events.append(self)

    def query(self) -> bool:
        return self.is_done

    def wait(self, stream: FakeStream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        if not self.is_done:
            self.is_done = True
            for event in self.stream.events[: self.place]:
                event.synchronize()

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.has_time and end.has_time and self.is_done and end.is_done
        return 2000.0


class FakeGraph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda, self.is_recorded = cuda, False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.name = self.cuda.current_stream().name
        assert self.name != "default" and not self.cuda.capturing
        assert pool == self.cuda.pool and capture_error_mode == "thread_local"
        self.cuda.log.append((self.name, "begins to record"))
        self.cuda.capturing.add(self.name)
        self.calls = self.cuda.recorder.begin_capture()

    def capture_end(self) -> None:
        assert self.cuda.current_stream().name == self.name
        self.cuda.capturing.remove(self.name)
        self.cuda.recorder.end_capture(self.calls)
        self.cuda.log.append((self.name, "ends recording"))
        if self.cuda.fails_to_end:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.is_recorded = True
        self.cuda.graphs.append(self)

    def raw_cuda_graph_exec(self) -> int:
        assert self.is_recorded
        return 1 + self.cuda.graphs.index(self)

    def replay(self) -> None:
        assert self.is_recorded and not self.cuda.capturing
        self.cuda.log.append((self.cuda.current_stream().name, "replays"))
        self.calls.replay()


class FakeCuda:
    """pool: the one there is. allocated, peak: what the memory functions tell."""

    def __init__(self) -> None:
        self.log: Log = []
        self.pool = (0, 7)
        self.capturing: set[str] = set()
        self.graphs: list[FakeGraph] = []
        self.fails_to_end = False
        self.sync_debug_mode = 0
        self.allocated, self.peak, self.free, self.total = 0, 0, 80 << 30, 100 << 30
        self.recorder = LateDevice(CPU)
        self._default, self._here, self._num = FakeStream(self, "default"), threading.local(), 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of torch.cuda, and take `pin_memory` and devices away from torch."""
        for name in ("Stream", "Event", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, _type_of(self, name))
        for name in (
            "current_stream",
            "set_stream",
            "stream",
            "get_sync_debug_mode",
            "set_sync_debug_mode",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        told = {
            "graph_pool_handle": lambda: self.pool,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.allocated,
            "reset_peak_memory_stats": lambda device: None,
            "mem_get_info": lambda device: (self.free, self.total),
            "get_device_name": lambda device: "a fake",
            "empty_cache": lambda: self.log.append(("host", "empties the cache")),
            "synchronize": lambda device: self.log.append(("host", "synchronizes")),
        }
        for name, function in told.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocate, raising=False)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *its: self._record_stream(*its))
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin_memory(tensor))
        monkeypatch.setattr(torch, "as_tensor", _as_tensor(torch.as_tensor))
        monkeypatch.setattr(torch.Tensor, "to", _on_cpu(torch.Tensor.to))
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, _on_cpu(getattr(torch, name)))

    def new_stream(self, device: Any = None) -> FakeStream:
        self._num += 1
        return FakeStream(self, f"stream {self._num}")

    def current_stream(self, device: Any = None) -> FakeStream:
        return getattr(self._here, "stream", self._default)

    def set_stream(self, stream: FakeStream) -> None:
        self._here.stream = stream

    @contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        before = self.current_stream()
        self._here.stream = stream or before
        try:
            yield
        finally:
            self._here.stream = before

    def get_sync_debug_mode(self) -> int:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore

    def _end_allocate(self, index: int, pool: Any) -> None:
        assert index == 0 and pool == self.pool
        self.log.append(("allocator", "put right"))

    def _record_stream(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.log.append((stream.name, "keeps", tuple(tensor.shape)))

    def _pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        assert not self.capturing, "memory is pinned while recording"
        return tensor.clone()


def _type_of(cuda: FakeCuda, name: str) -> Any:
    """A class, for isinstance, whose objects belong to this fake."""
    if name == "Stream":
        return cuda.new_stream
    base: Any = {"Event": FakeEvent, "CUDAGraph": FakeGraph}[name]

    class Bound(base):
        def __init__(self, **options: Any) -> None:
            super().__init__(cuda, **options)

    return Bound


def _on_cpu(function: Any) -> Any:
    """Pinned and device memory is the host's."""

    def make(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        args = tuple(CPU if _is_cuda(each) else each for each in args)
        if _is_cuda(options.get("device")):
            options["device"] = CPU
        return function(*args, **options)

    return make


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _as_tensor(function: Any) -> Any:
    """The interface of CUDA arrays is numpy's; as with torch, a result does not keep the memory."""

    def make(values: Any, **options: Any) -> torch.Tensor:
        found = getattr(values, "__cuda_array_interface__", None)
        if found is None:
            return function(values, **options)
        return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=found)))

    return make
