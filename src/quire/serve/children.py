"""The supervisor's processes, each of which may be started several times under one name."""

import contextlib
import os
import signal
import struct
import subprocess
from collections.abc import Callable

READY = struct.Struct("<I")  # what an API process writes when it answers: its index
Process = subprocess.Popen[bytes]

MAX_RESTARTS, RESTART_WINDOW_S = 3, 120.0  # what dies more often is given up
FIRST_PAUSE_S = 1.0  # before the second restart of a window; then twice as long each time


class Restarts:
    """How often a process that died is started anew, and after which pause."""

    def __init__(self) -> None:
        self._deaths_s: list[float] = []

    def pause_s(self, now_s: float) -> float | None:
        """Note a death; return the seconds until it may be started; None if it has died too often
        of late."""
        recent = [at_s for at_s in self._deaths_s if now_s - at_s < RESTART_WINDOW_S]
        self._deaths_s = [*recent, now_s]
        if len(recent) >= MAX_RESTARTS:
            return None
        return FIRST_PAUSE_S * 2.0 ** (len(recent) - 1) if recent else 0.0


class Child:
    """A process of the supervisor, and when it is started again.

    pidfd: becomes readable when the process has ended; -1 while none runs. due_s: when the next one
    is to be started; None if not. was_told: that it is to end. was_killed: and is about to go.
    """

    def __init__(self, name: str, start: Callable[[], Process], may_restart: bool) -> None:
        self.name = name
        self.pidfd = -1
        self.due_s: float | None = 0.0
        self.was_told = self.was_killed = False
        self._start = start
        self._process: Process | None = None
        self._restarts = Restarts() if may_restart else None

    @property
    def is_running(self) -> bool:
        return self.pidfd >= 0

    @property
    def pid(self) -> int:
        """The id of the process; there must be one."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it. Raise OSError if that is not possible; it is as if it had died."""
        self.due_s = None
        self.was_told = self.was_killed = False
        self._process = self._start()
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # nobody would see to it
            self._process.kill()
            self._process.wait()
            raise

    def plan_restart(self, now_s: float) -> float | None:
        """Have it started again after its death. Return the pause, None if it is given up."""
        pause_s = None if self._restarts is None else self._restarts.pause_s(now_s)
        self.due_s = None if pause_s is None else now_s + pause_s
        return pause_s

    def end(self) -> None:
        """Tell it to end, and start it no more."""
        self.due_s = None
        self.was_told = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def bury(self) -> int:
        """Return the exit status of what has ended."""
        assert self._process is not None
        status = self._process.wait()
        self.leave()
        return status

    def kill(self) -> None:
        """Kill it, and start it no more."""
        self.due_s = None
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait until a killed process has gone; a device driver may hold it for longer."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def leave(self) -> None:
        """Watch it no longer."""
        os.close(self.pidfd)
        self.pidfd = -1
