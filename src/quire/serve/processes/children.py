"""Child processes of the supervisor, each of which may be started several times under one name.

`CoreChild` is a core: its process, and whether it makes progress.
"""

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


logger = logging.getLogger("quire")

DUMP_S = 2.0  # for a stuck core to show where it is
NEVER = float("inf")


class CoreChild:
    """path: of its socket. until_s: when a stuck one is to be looked at again: first it shows where
    it is, then it is to be gone. is_lost: it cannot be killed."""

    def __init__(self, child: Child, path: Path, heartbeat: Path) -> None:
        self.child = child
        self.path = path
        self.until_s = NEVER
        self.is_lost = False
        self._watch = StuckWatch(HeartbeatReader(heartbeat), lambda: read_threads(child.pid))

    def look(self, now: float, is_ending: bool) -> None:
        """See to it if it is stuck. is_ending: the server is."""
        child = self.child
        if child.is_running and not child.was_told and self._watch.is_stuck(now):
            self._let_show(now)
        if now > self.until_s:
            self._kill(now, is_ending)

    def forget(self) -> None:
        """Forget a process that has ended."""
        self._watch.forget()
        self.until_s = NEVER

    def _let_show(self, now: float) -> None:
        """Let it show where it is stuck (faulthandler); then it is killed, if it is still there."""
        logger.error("%s makes no progress; this is where it is stuck:", self.child.name)
        self._watch.forget()
        self.until_s = now + DUMP_S
        self.child.signal(signal.SIGABRT)

    def _kill(self, now: float, is_ending: bool) -> None:
        """The supervisor buries it, unless even that is of no use: a device driver may hold it."""
        self.until_s = NEVER
        if not self.child.was_killed:
            self.until_s = now + END_S
            self.child.signal(signal.SIGKILL)
            self.child.was_killed = True
        elif not is_ending:
            logger.error("%s cannot be killed; the server stops without it", self.child.name)
            self.is_lost = True
