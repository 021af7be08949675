"""NVIDIA's driver as a small library (fake_libcuda.c), compiled here, and a device that uses it.

Kernels of the driver are Triton's, run by the interpreter. They get the arguments that the launch
passed. Work is done as late as on a LateDevice.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.ops.host.native import core
from quire.runner.device import StepClock
from quire.runner.gpu import step_launcher
from quire.runner.gpu.step_launcher import MailArrival, PreparedKernel
from quire.runner.setup import assemble
from tests.support.runner.late_device import LateDevice, RecordedCalls, stand_in

SOURCE = Path(__file__).with_name("fake_libcuda.c")
CALLS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuLaunchKernel",
    "cuGraphLaunch",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventQuery",
)
OF_A_STEP = {"cuLaunchKernel", "cuGraphLaunch", "cuEventRecord"}
COMPILER = shutil.which("cc")
NEEDED = pytest.mark.skipif(
    COMPILER is None or core() is None, reason="needs a C compiler and the core"
)

OnKernel = ctypes.CFUNCTYPE(
    None, ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)
OnGraph = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


@functools.cache
def compiled(left_out: str = "") -> str:
    """Path of the library. left_out: name of a function that it lacks."""
    folder = Path(tempfile.mkdtemp(prefix="fake_libcuda"))
    path, source = folder / "libcuda.so.1", folder / "fake.c"
    text = SOURCE.read_text()
    source.write_text(text.replace(left_out, f"no_{left_out}") if left_out else text)
    assert COMPILER is not None
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "-o", path, source], check=True)
    return str(path)


class FakeDriver:
    """The library, and what it has been called with."""

    def __init__(self) -> None:
        self.path = compiled()
        self._library = ctypes.CDLL(self.path)
        self._library.fake_count.restype = ctypes.c_long
        self._library.fake_cost.argtypes = ctypes.c_int, ctypes.c_long
        self._library.fake_reset()
        self._held: list[Any] = []

    def counts(self) -> dict[str, int]:
        """Calls since the start, by name."""
        found = {name: self._library.fake_count(i) for i, name in enumerate(CALLS)}
        return {name: count for name, count in found.items() if count}

    def fail(self, call: str, error: int = 700) -> None:
        """Let a call return this error; 0: let it succeed again."""
        self._library.fake_fail(CALLS.index(call), error)

    def cost(self, call: str, ns: int) -> None:
        """Let a call take this time."""
        self._library.fake_cost(CALLS.index(call), ns)

    def answer(self, mail: torch.Tensor, flags_at: int) -> None:
        """Let each graph write tokens of 1 into the mail at once. mail: int32 [Q, W]."""
        self._held.append(mail)
        self._library.fake_answers(
            ctypes.c_void_p(mail.data_ptr()), ctypes.c_long(mail.shape[1]), ctypes.c_long(flags_at)
        )

    def set_events(self, state: int) -> None:
        """Set what all events report: 0 done, 600 not done."""
        self._library.fake_events(state)

    def set_context(self, context: int) -> None:
        self._library.fake_context(ctypes.c_uint64(context))

    def listen(self, on_kernel: Callable[..., None], on_graph: Callable[[int], None]) -> None:
        """Execute kernels and graphs by these functions."""
        held = OnKernel(on_kernel), OnGraph(on_graph)
        self._held += held
        self._library.fake_callbacks(*held)


class Executed:
    """What the driver launches: kernels that were prepared here, and graphs by address. submit:
    takes the work of each launch."""

    def __init__(
        self,
        fake: FakeDriver,
        submit: Callable[[Callable[[], Any]], Any],
        graph_at: Callable[[int], Any],
    ) -> None:
        self._kernels: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._submit, self._graph_at = submit, graph_at
        self.last: Any = None  # of the last graph
        fake.listen(self._on_kernel, self._on_graph)

    def prepare(self, kernel: Any, arguments: tuple[Any, ...], constants: Any) -> PreparedKernel:
        """In the place of Triton's compiler."""
        self._kernels.append((kernel, arguments, constants))
        signature = dict.fromkeys(kernel.arg_names[: len(arguments)], "i32")
        named = step_launcher.arguments_of(signature, arguments)
        return PreparedKernel(len(self._kernels), 128, 0, named)

    def _on_kernel(self, function: int, programs: int, threads: int, parameters: Any) -> None:
        kernel, arguments, constants = self._kernels[function - 1]
        passed = [_passed(each, parameters[i]) for i, each in enumerate(arguments)]
        assert threads == 128
        self._submit(lambda: kernel[(programs,)](*passed, **constants))

    def _on_graph(self, address: int) -> None:
        self.last = self._submit(self._graph_at(address).replay)


class LaunchedDevice(LateDevice):
    """A LateDevice whose steps the core launches through the fake driver."""

    def __init__(self, device: torch.device, fake: FakeDriver) -> None:
        super().__init__(device)
        self.driver, self.clock, self.stream_address = fake.path, StepClock(), 1
        self.executed = Executed(
            fake,
            lambda work: self.run(lambda: [] if work() is None else []),
            lambda address: self.graphs[address - 1],
        )

    def claim_thread(self) -> None: ...

    def graph_address(self, graph: RecordedCalls) -> int:
        return 1 + self.graphs.index(graph)


def _passed(given: Any, address: int) -> Any:
    """An argument as the kernel finds it: an integer, or the memory at an address."""
    if not isinstance(given, torch.Tensor):
        return ctypes.c_int32.from_address(address).value
    found = ctypes.c_uint64.from_address(address).value
    if found == given.data_ptr():
        return given
    assert given.dtype == torch.int32
    memory = (ctypes.c_int32 * given.numel()).from_address(found)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(given.shape)


def launch_natively(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> list[LaunchedDevice]:
    """Runners are made on such devices from now on; they are added to the returned list."""
    devices: list[LaunchedDevice] = []

    def make(device: torch.device) -> LaunchedDevice:
        devices.append(LaunchedDevice(device, fake))
        return devices[-1]

    class Late(MailArrival):
        """Nothing works before a thread waits for it."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._work = devices[-1].executed.last

        def wait(self) -> list[Any]:
            devices[-1].work_until(self._work)
            return super().wait()

    module = core()
    stand_in(monkeypatch, make)
    monkeypatch.setattr(step_launcher, "core", lambda: module)  # also without_core
    monkeypatch.setattr(assemble, "CudaDevice", LaunchedDevice)
    monkeypatch.setattr(step_launcher, "MailArrival", Late)
    monkeypatch.setattr(
        step_launcher, "prepare_kernel", lambda *its: devices[-1].executed.prepare(*its)
    )
    return devices
