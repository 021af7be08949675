"""A core of the supervisor: its process, and whether it makes progress."""

import logging
import signal
from pathlib import Path

from quire.engine.observability.heartbeat import HeartbeatReader, StuckWatch
from quire.engine.observability.starvation import read_threads
from quire.serve.children import Child
from quire.serve.launch import END_S

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
