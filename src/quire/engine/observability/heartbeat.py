"""Heartbeat of a core, which other processes can read while the core is busy or stuck.

It is a small mapped file in the private directory. The core writes it; any watching process reads:

    deadline  of the current step or, while idle, of the next poll, in seconds; 0.0 before the first
    steps     number of steps so far
    load      open work in tokens (`engine/wire/core_choice.py`)

The deadline is on the monotonic clock, which all processes of a machine share. A core that misses
it counts as stuck only on evidence (`StuckWatch`): time in which the process waited for a CPU is
subtracted (`engine/observability/starvation.py`).
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

from quire.base.settings.config import EngineConfig
from quire.engine.observability.starvation import ReadThreads, Starvation, no_threads

FIELDS = struct.Struct("<dq")
LOAD = struct.Struct("<qq")  # a LoadReport, after FIELDS
CPU_FLOPS, GPU_FLOPS = 1e10, 1e13
COMPILE_S = 60.0
MIN_LIMIT_S = 10.0
TOLERANCE = 10.0
CONFIRM_S = 0.9  # time for which all looks must find the core late
FORGET = 0.999  # decay of the longest step's time per step


class LoadReport(NamedTuple):
    """Report of a core's open work."""

    tokens: int = 0
    number: int = 0  # sequence number, which distinguishes two reports of the same load


class StepLimit:
    """Time limit of a step: ten times the expected time, at least MIN_LIMIT_S. expected_s:
    estimated time of a large step, used until one is measured."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s

    @property
    def seconds(self) -> float:
        return max(MIN_LIMIT_S, TOLERANCE * self._expected_s)

    def observe(self, took_s: float) -> None:
        """Raise the expected time to a longer step; decay it slowly otherwise."""
        self._expected_s = max(took_s, FORGET * self._expected_s)


def expected_step_s(config: EngineConfig, device: str, weights_bytes: int) -> float:
    """Estimate the seconds of the largest step generously: two operations per weight and token, two
    bytes per weight, at a low rate. Add COMPILE_S where torch compiles in the first steps."""
    num_tokens = config.scheduler.max_num_batched_tokens or 1
    compiling_s = COMPILE_S if config.model.torch_compile else 0.0
    rate = CPU_FLOPS if device == "cpu" else GPU_FLOPS
    return compiling_s + weights_bytes * num_tokens / rate


class Heartbeat:
    """Writing side of the heartbeat, in the core. expected_s: as in `StepLimit`."""

    def __init__(self, path: Path, expected_s: float) -> None:
        path.write_bytes(bytes(FIELDS.size + LOAD.size))
        self._memory = _map(path, mmap.ACCESS_WRITE)
        self._limit = StepLimit(expected_s)
        self._num_steps = self._num_reports = 0
        self._began_s = self._phase_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start a step's deadline: ten times the expected time, at least 10 s from now."""
        self._began_s = now_s
        self._write(now_s, self._limit.seconds)

    def end(self, now_s: float) -> None:
        """Count a step that has ended, and start the deadline of the next one."""
        if not self._phase_s:
            self._limit.observe(now_s - self._began_s)
        self._num_steps += 1
        self.begin(now_s)

    def extend(self, now_s: float, phase_s: float = 0.0) -> None:
        """Restart the deadline after progress within a step, from any thread. phase_s: minimum
        limit of the phase that begins now and ends with the next call."""
        self._phase_s = phase_s
        self._write(now_s, self._limit.seconds)

    def wait(self, now_s: float, wait_s: float) -> None:
        """Set the deadline of an idle core: it polls for messages within wait_s, plus
        MIN_LIMIT_S."""
        self._write(now_s + wait_s, MIN_LIMIT_S)

    def _write(self, now_s: float, limit_s: float) -> None:
        deadline_s = now_s + max(limit_s, self._phase_s)
        FIELDS.pack_into(self._memory, 0, deadline_s, self._num_steps)

    def report_load(self, load: int) -> None:
        """Publish the core's open work in tokens, for clients that choose a core."""
        self._num_reports += 1
        LOAD.pack_into(self._memory, FIELDS.size, load, self._num_reports)


class HeartbeatReader:
    """Reading side of the heartbeat, in a watching process. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def is_stuck(self, now_s: float) -> bool:
        """Return whether the core's deadline has passed."""
        return 0.0 < self.deadline_s() < now_s

    def deadline_s(self) -> float:
        """Return the core's deadline on the monotonic clock; 0.0 before the first step."""
        if not self._is_there(FIELDS.size):
            return 0.0
        assert self._memory is not None
        return float(FIELDS.unpack_from(self._memory, 0)[0])

    def load(self) -> LoadReport:
        """Return the last report of the core's open work."""
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
        """Delete the file of a core that has ended; the next core writes a new file."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._path.unlink(missing_ok=True)


class StuckWatch:
    """Detector of a stuck core, for a watcher that looks about once a second.

    A core is stuck if it is past its deadline by more than the time it was starved of CPU. Past the
    deadline it is also stuck if one thread used the whole limit as CPU time (an endless loop).
    One late look is not enough: after a pause of the whole machine or container, the watcher may
    run before the core does.

    read: returns the threads of the core's process.
    """

    def __init__(self, reader: HeartbeatReader, read: ReadThreads = no_threads) -> None:
        self._reader, self._read = reader, read
        self._late_since_s: float | None = None
        self._deadline_s = self._limit_s = 0.0
        self._starvation: Starvation | None = None  # from the second look at one deadline on

    def is_stuck(self, now_s: float) -> bool:
        """Return whether this look and all looks of the last CONFIRM_S found the core late."""
        self._account(self._reader.deadline_s(), now_s)
        if not self._is_late(now_s):
            self._late_since_s = None
            return False
        if self._late_since_s is None:
            self._late_since_s = now_s
        return now_s - self._late_since_s >= CONFIRM_S

    def forget(self) -> None:
        """Forget a core that has ended, and delete its file."""
        self._late_since_s = self._starvation = None
        self._deadline_s = 0.0
        self._reader.forget()

    def _account(self, deadline_s: float, now_s: float) -> None:
        """Measure the process's starvation for one deadline. A new deadline means progress."""
        if deadline_s != self._deadline_s:
            self._deadline_s, self._starvation = deadline_s, None
            self._limit_s = max(MIN_LIMIT_S, deadline_s - now_s)
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
