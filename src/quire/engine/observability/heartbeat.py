"""A sign of life that another process can read while this one is busy, or stuck.

Some bytes in a file of the private directory, mapped by the core, which writes, and by any process
that watches it: when the present step must be over, or at rest the next look at what has come
(seconds of the monotonic clock, which all processes of a machine share; 0.0 before the first step),
how many steps there were, and how much work is open (`engine/wire/core_choice.py`).

A core that is late is stuck only on evidence (`StuckWatch`): wall time in which the process waited
for a CPU does not count (`engine/observability/starvation.py`).
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from quire.base.settings.config import EngineConfig
from quire.engine.observability.starvation import ReadThreads, Starvation, no_threads

FIELDS = struct.Struct("<dq")
LOAD = struct.Struct("<qq")  # after them: a LoadReport
CPU_FLOPS, GPU_FLOPS = 1e10, 1e13
COMPILE_S = 60.0
LEAST_S = 10.0
TOLERANCE = 10.0
CONFIRM_S = 0.9  # between the first look that found the core late, and one that counts
FORGET = 0.999  # per step: how fast the longest step is forgotten


class LoadReport(NamedTuple):
    """What a core says of its open work."""

    tokens: int = 0
    number: int = 0  # of the report: two reports of the same load differ in it


class StepLimit:
    """How long a step may take: ten times the expected time, at least LEAST_S. expected_s: what a
    large step takes, as long as none was measured."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s

    @property
    def seconds(self) -> float:
        return max(LEAST_S, TOLERANCE * self._expected_s)

    def observe(self, took_s: float) -> None:
        """Follow the longest step, and slowly forget it."""
        self._expected_s = max(took_s, FORGET * self._expected_s)


def expected_step_s(config: EngineConfig, device: str, weights_bytes: int) -> float:
    """Guess generously: two operations per weight and token of the largest step; where torch
    compiles, the first steps take as long as that. device: its type."""
    num_tokens = config.scheduler.max_num_batched_tokens or 1
    compiling_s = COMPILE_S if config.model.torch_compile else 0.0
    rate = CPU_FLOPS if device == "cpu" else GPU_FLOPS
    return compiling_s + weights_bytes * num_tokens / rate


class Heartbeat:
    """Written by the core. expected_s: what a large step takes, as long as none was measured."""

    def __init__(self, path: Path, expected_s: float) -> None:
        path.write_bytes(bytes(FIELDS.size + LOAD.size))
        self._memory = _map(path, mmap.ACCESS_WRITE)
        self._limit = StepLimit(expected_s)
        self._num_steps = self._num_reports = 0
        self._began_s = self._phase_s = 0.0

    def begin(self, now_s: float) -> None:
        """Note that a step begins: it must end within ten times the expected time, at least 10
        s."""
        self._began_s = now_s
        self._write(now_s, self._limit.seconds)

    def end(self, now_s: float) -> None:
        """Note that the step has ended: what follows must be over in time as well."""
        if not self._phase_s:
            self._limit.observe(now_s - self._began_s)
        self._num_steps += 1
        self.begin(now_s)

    def extend(self, now_s: float, phase_s: float = 0.0) -> None:
        """Note progress, from any thread: the deadline counts from here. phase_s: a phase begins
        that may take so long; it ends with the next call."""
        self._phase_s = phase_s
        self._write(now_s, self._limit.seconds)

    def wait(self, now_s: float, wait_s: float) -> None:
        """Note that no step is under way: the core waits for so long at most, then looks what has
        come."""
        self._write(now_s + wait_s, LEAST_S)

    def _write(self, now_s: float, limit_s: float) -> None:
        deadline_s = now_s + max(limit_s, self._phase_s)
        FIELDS.pack_into(self._memory, 0, deadline_s, self._num_steps)

    def tell_load(self, load: int) -> None:
        """Report how many tokens of work are open here, to the clients that choose a core."""
        self._num_reports += 1
        LOAD.pack_into(self._memory, FIELDS.size, load, self._num_reports)


class HeartbeatReader:
    """Read by the watcher. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether the present step should have been over by now."""
        return 0.0 < self.deadline_s() < now_s

    def deadline_s(self) -> float:
        """Return when the present step must be over; 0.0 before the first."""
        if not self._is_there(FIELDS.size):
            return 0.0
        assert self._memory is not None
        return float(FIELDS.unpack_from(self._memory, 0)[0])

    def load(self) -> LoadReport:
        """Return the core's last report of its open work."""
        if not self._is_there(FIELDS.size + LOAD.size):
            return LoadReport()
        assert self._memory is not None
        return LoadReport(*LOAD.unpack_from(self._memory, FIELDS.size))

    def _is_there(self, num_bytes: int) -> bool:
        if self._memory is None:
            if not self._path.exists() or self._path.stat().st_size < num_bytes:
                return False
            self._memory = _map(self._path, mmap.ACCESS_READ)
        return len(self._memory) >= num_bytes

    def forget(self) -> None:
        """Forget a core that has ended; the next one writes a new file."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._path.unlink(missing_ok=True)


class StuckWatch:
    """Finds a core that is stuck, for a watcher that looks about once a second.

    A core is stuck once its deadline has passed and the time that it was starved of CPU does not
    explain that, or once a thread has used the whole limit as CPU time (an endless loop on a busy
    machine). Late at one look is not enough: after a machine or container has stood still as a
    whole, the watcher may run before the core does.

    read: reports the threads of the core's process.
    """

    def __init__(self, reader: HeartbeatReader, read: ReadThreads = no_threads) -> None:
        self._reader, self._read = reader, read
        self._late_since_s: float | None = None
        self._deadline_s = self._limit_s = 0.0
        self._starvation: Starvation | None = None  # since the deadline was seen twice

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether it was late at this look and at those of the last CONFIRM_S."""
        self._account(self._reader.deadline_s(), now_s)
        if not self._is_late(now_s):
            self._late_since_s = None
            return False
        if self._late_since_s is None:
            self._late_since_s = now_s
        return now_s - self._late_since_s >= CONFIRM_S

    def forget(self) -> None:
        """Forget a core that has ended."""
        self._late_since_s = self._starvation = None
        self._deadline_s = 0.0
        self._reader.forget()

    def _account(self, deadline_s: float, now_s: float) -> None:
        """Follow the process as long as its deadline stands. A new deadline is progress."""
        if deadline_s != self._deadline_s:
            self._deadline_s, self._starvation = deadline_s, None
            self._limit_s = max(LEAST_S, deadline_s - now_s)
        elif self._starvation is None:
            self._starvation = Starvation(self._read, now_s)
        else:
            self._starvation.look(now_s)

    def _is_late(self, now_s: float) -> bool:
        if not 0.0 < self._deadline_s < now_s:
            return False
        starvation = self._starvation
        if starvation is None or starvation.cpu_s >= self._limit_s:
            return True
        return now_s > self._deadline_s + starvation.starved_s


def _map(path: Path, access: int) -> mmap.mmap:
    with path.open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=access)
