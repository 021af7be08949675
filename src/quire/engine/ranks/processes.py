"""Process of a rank as its parent sees it, and the transport for ranks as children of the core.

The kernel kills a child when the thread that started it ends (engine/wire/child.py). So the thread
that watches the ranks also starts them.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.base.errors import EngineError, RankLost
from quire.engine.ranks.messages import Stream, core_codec
from quire.engine.ranks.rank_set import END_S, LOOK_S, Rank, RankWatch
from quire.engine.wire.spawn import end_child, start_child
from quire.engine.wire.wire import READ_BYTES
from quire.runner.memory_plan import available_cpu_bytes

CONFIRM_S = 0.5  # time for which all looks must find a process stopped
STOPPED = "was stopped (SIGSTOP) and cannot be used"


class RankChild:
    """Process of a rank, as the thread that started it sees it."""

    def __init__(
        self,
        arguments: Sequence[str],
        config: object,
        fds: tuple[int, ...],
        log_level: str,
        environment: dict[str, str],
    ) -> None:
        module, pipe = "quire.engine.ranks.rank_main", subprocess.PIPE
        self.process = start_child(
            module, [*arguments], config, fds, log_level, environment, stderr=pipe
        )
        assert self.process.stderr is not None
        self.stderr = self.process.stderr
        os.set_blocking(self.stderr.fileno(), False)
        self.pidfd = os.pidfd_open(self.process.pid)  # readable once the process has ended
        self._rest = b""
        self._stopped_since_s: float | None = None

    def lines(self) -> list[str] | None:
        """Return the new complete lines of the rank's stderr; None at its end."""
        try:
            data = os.read(self.stderr.fileno(), READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def is_stopped(self, now_s: float) -> bool:
        """Return whether all looks of the last CONFIRM_S, including this one, found it stopped."""
        if state_of(self.process.pid) != "T":
            self._stopped_since_s = None
            return False
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        return now_s - self._stopped_since_s >= CONFIRM_S

    def close(self) -> None:
        self.stderr.close()
        os.close(self.pidfd)


def ended_with(status: int) -> str:
    """Describe the end of a rank with this exit status."""
    return f"has ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in proc(5); empty without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True)
class RankStart:
    """Parameters for starting a rank. cpus: logical CPUs to which it is bound; None: not bound.
    fds: file descriptors that it inherits."""

    arguments: list[str]
    environment: dict[str, str]
    cpus: frozenset[int] | None = None
    fds: tuple[int, ...] = ()


@dataclass(kw_only=True)
class _ChildRank(Rank):
    child: RankChild


class RankProcesses:
    """Transport for ranks that are children of this process, over socket pairs."""

    def __init__(self, starts: Sequence[RankStart], log_level: str) -> None:
        self.ranks: list[_ChildRank] = []
        self._starts, self._log_level = starts, log_level
        self._look_s = 0.0

    def begin(self, watch: RankWatch) -> None:
        """See Transport."""
        self._watch = watch
        for number, start in enumerate(self._starts):
            ours, theirs = socket.socketpair()
            with theirs:
                arguments = ["--socket", str(theirs.fileno()), *start.arguments]
                fds = theirs.fileno(), *start.fds
                child = RankChild(arguments, None, fds, self._log_level, start.environment)
            pid, stream = child.process.pid, Stream(ours, core_codec())
            rank = _ChildRank(number=number, stream=stream, pid=pid, child=child)
            self.ranks.append(rank)
            if start.cpus is not None:
                os.sched_setaffinity(pid, start.cpus)
            for file, see in (
                (ours, watch.read), (child.stderr, self._pass_on), (child.pidfd, self._note_end),
            ):  # fmt: skip
                watch.selector.register(file, selectors.EVENT_READ, partial(see, rank))

    @property
    def is_complete(self) -> bool:
        """See Transport."""
        return True

    def shares(self) -> list[tuple[int, int]]:
        """See Transport."""
        num = len(self.ranks)
        return [(num, available_cpu_bytes())] * num

    def look(self, now_s: float) -> None:
        """See Transport."""
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        for rank in self.ranks:
            if self._watch.loss is None and rank.child.is_stopped(now_s):
                self._watch.give_up(rank.number, STOPPED)

    def stop(self, error: RankLost) -> None:
        """See Transport."""
        for rank in self.ranks:
            rank.child.process.kill()

    def end(self, loss: RankLost | None) -> None:
        """See Transport: a rank ends when its stream does; kill ranks that run after END_S."""
        sockets = [rank.stream.socket for rank in self.ranks if rank.stream is not None]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + END_S
        for rank in self.ranks:
            end_child(rank.child.process, max(0.0, until_s - time.monotonic()))
            rank.child.close()
        for sock in sockets:
            sock.close()

    def _pass_on(self, rank: _ChildRank) -> None:
        lines = rank.child.lines()
        if lines is None:
            self._watch.selector.unregister(rank.child.stderr)
        for line in lines or ():
            self._watch.pass_on(rank, line)

    def _note_end(self, rank: _ChildRank) -> None:
        """End all ranks after one has ended, since no step can be computed without it."""
        selector = self._watch.selector
        selector.unregister(rank.child.pidfd)
        status = rank.child.process.wait()
        with contextlib.suppress(EngineError):
            while rank.hung_up_s is None:
                self._watch.read(rank)  # its last messages
        if rank.child.stderr in selector.get_map():
            self._pass_on(rank)
        self._watch.give_up(rank.number, ended_with(status))
