"""Child processes of the supervisor, each of which may be restarted under the same name.
`CoreChild` is a core: its process, with a check of its progress."""

import contextlib
import logging
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from quire.engine.observability.heartbeat import HeartbeatReader, StuckWatch
from quire.engine.observability.starvation import read_threads
from quire.serve.processes.launch import END_S

READY = struct.Struct("<I")  # written by an API process that answers requests: its index
Process = subprocess.Popen[bytes]

MAX_RESTARTS, RESTART_WINDOW_S = 3, 120.0  # limit of restarts within the window
FIRST_PAUSE_S = 1.0  # before the second restart of a window; doubles for each further one


class Restarts:
    """Limit on the restarts of a process that died, and the pauses before them."""

    def __init__(self) -> None:
        self._deaths_s: list[float] = []

    def pause_s(self, now_s: float) -> float | None:
        """Record a death. Return the seconds until the restart; None if the process died too often
        recently."""
        recent = [at_s for at_s in self._deaths_s if now_s - at_s < RESTART_WINDOW_S]
        self._deaths_s = [*recent, now_s]
        if len(recent) >= MAX_RESTARTS:
            return None
        return FIRST_PAUSE_S * 2.0 ** (len(recent) - 1) if recent else 0.0


class Child:
    """A process of the supervisor and the time of its next start.

    pidfd: becomes readable when the process ends; -1 if none runs. due_s: time of the next start;
    None if none is planned. is_stopping: whether it must end. was_killed: whether it was killed.
    """

    def __init__(self, name: str, start: Callable[[], Process], may_restart: bool) -> None:
        self.name = name
        self.pidfd = -1
        self.due_s: float | None = 0.0
        self.is_stopping = self.was_killed = False
        self._start = start
        self._process: Process | None = None
        self._restarts = Restarts() if may_restart else None

    @property
    def is_running(self) -> bool:
        return self.pidfd >= 0

    @property
    def pid(self) -> int:
        """The process id; the process must have been started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process. Raise OSError if that fails; the caller handles this like a death."""
        self.due_s = None
        self.is_stopping = self.was_killed = False
        self._process = self._start()
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # without a pidfd the supervisor could not watch the process
            self._process.kill()
            self._process.wait()
            raise

    def plan_restart(self, now_s: float) -> float | None:
        """Plan the restart after a death. Return the pause, None if there is no restart."""
        pause_s = None if self._restarts is None else self._restarts.pause_s(now_s)
        self.due_s = None if pause_s is None else now_s + pause_s
        return pause_s

    def end(self) -> None:
        """Ask the process to end, and plan no restart."""
        self.due_s = None
        self.is_stopping = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def bury(self) -> int:
        """Return the exit status of a process that has ended, and stop watching it."""
        assert self._process is not None
        status = self._process.wait()
        self.leave()
        return status

    def kill(self) -> None:
        """Kill the process, and plan no restart."""
        self.due_s = None
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait for the end of a killed process; a device driver may delay it beyond `seconds`."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def leave(self) -> None:
        """Stop watching the process."""
        os.close(self.pidfd)
        self.pidfd = -1


logger = logging.getLogger("quire")

DUMP_S = 2.0  # for a stuck core to log its stack traces
NEVER = float("inf")


class CoreChild:
    """A core as a child process. path: path of its socket. until_s: time of the next action on a
    stuck core: it logs its stack traces, is killed, and must then end. is_lost: whether it cannot
    be killed."""

    def __init__(self, child: Child, path: Path, heartbeat: Path) -> None:
        self.child = child
        self.path = path
        self.until_s = NEVER
        self.is_lost = False
        self._watch = StuckWatch(HeartbeatReader(heartbeat), lambda: read_threads(child.pid))

    def look(self, now: float, is_ending: bool) -> None:
        """Handle the core if it is stuck. is_ending: whether the server is ending."""
        child = self.child
        if child.is_running and not child.is_stopping and self._watch.is_stuck(now):
            self._let_show(now)
        if now > self.until_s:
            self._kill(now, is_ending)

    def forget(self) -> None:
        """Reset the watch after the end of a process."""
        self._watch.forget()
        self.until_s = NEVER

    def _let_show(self, now: float) -> None:
        """Make a stuck core log its stack traces (faulthandler). It is killed if it survives."""
        logger.error("%s makes no progress; this is where it is stuck:", self.child.name)
        self._watch.forget()
        self.until_s = now + DUMP_S
        self.child.signal(signal.SIGABRT)

    def _kill(self, now: float, is_ending: bool) -> None:
        """Kill a stuck core, or give it up if a device driver holds it even after the kill."""
        self.until_s = NEVER
        if not self.child.was_killed:
            self.until_s = now + END_S
            self.child.signal(signal.SIGKILL)
            self.child.was_killed = True
        elif not is_ending:
            logger.error("%s cannot be killed; the server stops without it", self.child.name)
            self.is_lost = True
