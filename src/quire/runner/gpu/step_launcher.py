"""Launch a recorded step by one call into the C++ core, and read its tokens without a copy.

The call (csrc/step_launcher.h) does not hold the interpreter's lock. It writes the plan's lists
into a slot of pinned memory, launches the `receive` kernel and the graph, and records an event. The
step's last kernel writes the tokens into the mail, which is pinned memory, with a flag. The host
waits for the flag. So a step takes three calls into the driver, no copy and no second stream.

The core opens the driver's library at run time. If that fails, steps are launched as without it.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.native import core
from quire.ops.host.native_types import CoreLauncher
from quire.ops.kernels import row_deltas
from quire.ops.kernels.step_inputs import HEADER, Inbox, Mail, num_flags
from quire.ops.rows.row_state import RowTensors
from quire.runner.device import Device, Graph, StepClock
from quire.runner.gpu.slots import Chunk, Slot, SlotRing
from quire.runner.step_ops import NUM_RESULTS, StepLists

logger = logging.getLogger("quire")

TIMEOUT_S = 600.0  # longest wait for a step, if the driver reports no error
VARYING = ("slot_ptr", "num_words", "num_deltas", "num_runs")  # arguments that a plan decides

Int32 = npt.NDArray[np.int32]


class LaunchingDevice(Device, Protocol):
    """Device whose stream other code may launch on. driver: path of the driver's library. clock:
    for steps without timed events."""

    driver: str
    clock: StepClock

    @property
    def stream_address(self) -> int:
        """Return the driver's handle of the stream."""
        ...

    def graph_address(self, graph: Graph) -> int:
        """Return the driver's handle of an executable graph."""
        ...

    def claim_thread(self) -> None:
        """Let all later work of this thread follow on the device's stream."""
        ...


@dataclass(frozen=True)
class PreparedKernel:
    """Compiled kernel as the driver launches it. arguments: by name, as 64-bit words. It takes two
    more, the addresses of scratch memory, which it does not use."""

    function: int
    num_threads: int
    shared_bytes: int
    arguments: dict[str, int]


def prepare_kernel(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> PreparedKernel:
    """Compile a Triton kernel for these arguments and load it. Raises RuntimeError if it needs more
    than a plain launch."""
    compiled = kernel.warmup(*arguments, grid=(1,), **constants)
    compiled._init_handles()  # loads the module
    facts = compiled.metadata
    scratch = facts.global_scratch_size, facts.profile_scratch_size
    if scratch != (0, 0) or facts.num_ctas != 1 or facts.launch_cooperative_grid:
        raise RuntimeError(f"{facts.name} needs scratch memory or clusters")
    named = arguments_of(compiled.src.signature, arguments)
    num_threads = facts.num_warps * facts.warp_size
    return PreparedKernel(compiled.function, num_threads, facts.shared, named)


def arguments_of(signature: dict[str, str], values: tuple[Any, ...]) -> dict[str, int]:
    """Return the machine code's arguments. signature: types by name, in order. Triton compiles
    integers of value 1 as constants, which are no arguments."""
    found = {
        name: each.data_ptr() if isinstance(each, torch.Tensor) else int(each)
        for (name, kind), each in zip(signature.items(), values, strict=False)
        if kind != "constexpr"
    }
    if missing := set(VARYING) - found.keys():
        raise RuntimeError(f"the kernel was compiled for one value of {sorted(missing)}")
    return found


class StepLauncher:
    """Launches the recorded steps of one runner. ring: slots of the plans. inbox: where a step
    finds its lists."""

    def __init__(
        self, device: LaunchingDevice, state: RowTensors, inbox: Inbox, ring: SlotRing
    ) -> None:
        max_rows = len(state.computed_R)
        shape = NUM_RESULTS, Mail.width(max_rows)
        self.mail = Mail(device.pinned(shape[0] * shape[1]).view(shape), max_rows)
        self._tokens_QW: Int32 = self.mail.words_QW.numpy()
        self._device, self._ring = device, ring
        self._core = self._make(device, state, inbox, ring)

    def _make(
        self, device: LaunchingDevice, state: RowTensors, inbox: Inbox, ring: SlotRing
    ) -> CoreLauncher:
        module = core()
        if module is None:
            raise RuntimeError("the C++ core was not built")
        layout, mail = ring.layout, self.mail
        words = ring.first.words
        arguments = row_deltas.receive_arguments(state, inbox, words, layout, (0, 0, 0))
        kernel = prepare_kernel(row_deltas._receive_kernel, arguments, row_deltas.RECEIVE_CONSTANTS)
        names = list(kernel.arguments)
        return module.StepLauncher(
            driver=device.driver,
            stream=device.stream_address,
            function=kernel.function,
            num_threads=kernel.num_threads,
            shared_bytes=kernel.shared_bytes,
            max_programs=row_deltas.PROGRAMS,
            block=row_deltas.BLOCK,
            arguments=[*kernel.arguments.values(), 0, 0],
            varying=[names.index(name) for name in VARYING],
            plan=[HEADER, layout.max_rows, layout.deltas_at, layout.max_deltas],
            mail=mail.words_QW.data_ptr(),
            mail_layout=[*mail.words_QW.shape, mail.max_rows],
        )

    def launch(self, slot: Slot, chunk: Chunk, lists: StepLists, graph: Graph) -> "MailArrival":
        """Launch a step: its changes, in this slot, and its graph. Raises RuntimeError if the
        driver refuses, and EngineError if the step was launched and cannot be waited for."""
        device = self._device
        device.claim_thread()
        if chunk.runs:
            self._ring.write_runs(slot, chunk)
        ticket = self._core.launch(
            slot.address,
            lists.result_slot,
            lists.rows,
            lists.num_tokens,
            lists.sample_rows,
            lists.sample_indices,
            chunk.deltas,
            len(chunk.runs),
            device.graph_address(graph),
        )
        tokens = self._tokens_QW[lists.result_slot, : len(lists.sample_rows)]
        return MailArrival(self._core, device.clock, tokens, (lists.result_slot, ticket))


class MailArrival:
    """Tokens of a step on their way to the mail. tokens: view of the mail, which a later step
    overwrites once they were read. where: slot of the mail and ticket."""

    def __init__(
        self, launcher: CoreLauncher, clock: StepClock, tokens: Int32, where: tuple[int, int]
    ) -> None:
        self._launcher, self._clock, self._tokens = launcher, clock, tokens
        self._where = *where, num_flags(len(tokens))
        self._began_s = time.perf_counter()
        self._duration_s = 0.0
        self._read: Int32 | None = None
        self._reading = threading.Lock()  # two threads may wait for a step

    def is_done(self) -> bool:
        """See Arrival. It also reads the tokens."""
        if self._read is None and self._reading.acquire(blocking=False):
            if self._read is None and self._launcher.is_done(*self._where):
                self._take()
            self._reading.release()
        return self._read is not None

    def wait(self) -> list[Any]:
        """See Arrival. Raises RuntimeError if the driver reports an error."""
        with self._reading:
            if self._read is None:
                self._launcher.wait(*self._where, TIMEOUT_S)
                self._take()
        return [self._read]

    def duration_s(self) -> float:
        """See Arrival. The time is the host's: it begins with the launch or with the end of the
        step before."""
        return self._duration_s

    def _take(self) -> None:
        self._duration_s = self._clock.end(self._began_s)
        self._read = self._tokens.copy()


def make_launcher(
    device: LaunchingDevice, state: RowTensors, inbox: Inbox, ring: SlotRing
) -> StepLauncher | None:
    """Return a launcher, or None with a warning if the core, the driver or the kernel does not
    allow one."""
    try:
        return StepLauncher(device, state, inbox, ring)
    except Exception as error:
        logger.warning("native_launch has no effect: %s", error)
        return None
