"""The processes of a core's ranks: one thread starts them, hears them and sees to their ends.

    thread   start ... | messages -> hear(rank, message) | what ranks write on stderr -> ours
             | a process has ended, or is stopped (SIGSTOP): lost(error), all others are killed

The kernel kills a child when the thread that started it ends (engine/wire/child.py), so it is this
one. Sends come from any thread. A rank that does not read holds its sender up only until it is
lost.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quire.base.errors import EngineError, RankLost
from quire.engine.ranks.messages import Failed, FromRank, ToRank, core_codec, frames
from quire.engine.wire.spawn import start_child
from quire.engine.wire.wire import Codec, Frames
from quire.runner.memory_plan import available_cpu_bytes

END_S = 5.0  # for a rank to end by itself
LOOK_S = 0.3  # between two looks at the states of processes
CONFIRM_S = 0.5  # a process that was stopped, and is so long afterwards, is lost
LAST_LINES = 12
READ_BYTES = 1 << 18


class RankLink(Protocol):
    """What all ranks are told, from any thread."""

    def send(self, message: ToRank) -> None:
        """Send all the same; what several threads send comes in one order everywhere."""
        ...

    def give_up(self, rank: int, why: str) -> None:
        """Kill all; the listener's `lose` gets this reason behind the name of a rank, unless one
        was lost before."""
        ...


class Listener(Protocol):
    """Who is told of ranks, on their thread."""

    def hear(self, rank: int, message: FromRank) -> None:
        """Take what a rank says."""
        ...

    def lose(self, error: RankLost) -> None:
        """One is gone before `close`, so all are: called once, perhaps from another thread."""
        ...

    def tick(self) -> None:
        """Look around; called some times a second."""
        ...


class RankSet(Protocol):
    """All ranks of a core, wherever they are."""

    @property
    def link(self) -> RankLink:
        """What a listener may hold, which must not hold this object."""
        ...

    def tell(self, listener: Listener) -> None:
        """Tell another listener from now on; at once, if a rank is lost already."""
        ...

    def shares(self) -> list[tuple[int, int]]:
        """Return how many share each rank's machine, and what is free of its memory."""
        ...

    def send_each(self, messages: Sequence[ToRank]) -> None:
        """Send each rank its own."""
        ...

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        ...


@dataclass(frozen=True)
class RankStart:
    """How to start a rank. cpus: the logical CPUs that it is bound to; None: not bound. fds: that
    it inherits."""

    arguments: list[str]
    environment: dict[str, str]
    cpus: frozenset[int] | None = None
    fds: tuple[int, ...] = ()


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    socket: socket.socket
    pidfd: int
    frames: Frames = field(default_factory=frames)
    line: bytes = b""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    stopped_since_s: float | None = None
    failed: Failed | None = None

    def is_stopped(self, now_s: float) -> bool:
        """Tell whether the process stands still, at this look and those of the last CONFIRM_S."""
        if state_of(self.process.pid) != "T":
            self.stopped_since_s = None
            return False
        if self.stopped_since_s is None:
            self.stopped_since_s = now_s
        return now_s - self.stopped_since_s >= CONFIRM_S

    @property
    def last_words(self) -> str:
        if self.failed is not None:
            return f": {self.failed.kind}: {self.failed.message}"
        return ":\n  " + "\n  ".join(self.last_lines) if self.last_lines else ""


class RankProcesses:
    """Started at once. listener: may be another one later."""

    def __init__(self, starts: Sequence[RankStart], log_level: str, listener: Listener) -> None:
        self._loop = _Loop(starts, log_level, listener)
        self._thread = threading.Thread(target=self._loop.run, name="quire-ranks", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _close, self._loop, self._thread)
        self._loop.started.wait()
        if self._loop.error is not None:
            self.close()
            raise self._loop.error

    def tell(self, listener: Listener) -> None:
        """Tell another listener from now on; at once, if a rank is lost already."""
        self._loop.tell(listener)

    @property
    def link(self) -> RankLink:
        """See RankSet."""
        return self._loop

    def shares(self) -> list[tuple[int, int]]:
        """See RankSet: all are on this machine."""
        num = len(self._loop.ranks)
        return [(num, available_cpu_bytes())] * num

    def send_each(self, messages: Sequence[ToRank]) -> None:
        """Send each rank its own."""
        with self._loop.sending:
            for rank, message in zip(self._loop.ranks, messages, strict=True):
                self._loop.send_to(rank, self._loop.codec.encode(message))

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        self._end()


def _close(loop: "_Loop", thread: threading.Thread) -> None:
    loop.close()
    if thread is not threading.current_thread():
        thread.join(2 * END_S)


class _Loop:
    """The thread's side: it must not hold `RankProcesses`, whose end is its own."""

    def __init__(self, starts: Sequence[RankStart], log_level: str, listener: Listener) -> None:
        self.codec: Codec[FromRank] = core_codec()
        self.ranks: list[_Rank] = []
        self.sending = threading.Lock()
        self.started = threading.Event()
        self.error: BaseException | None = None
        self._starts, self._log_level = starts, log_level
        self.listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._is_closing = False
        self.loss: RankLost | None = None
        self._look_s = 0.0
        self._losing = threading.Lock()

    # ---- for other threads -------------------------------------------------------------------

    def send(self, message: ToRank) -> None:
        """See RankLink."""
        data = self.codec.encode(message)
        with self.sending:
            for rank in self.ranks:
                self.send_to(rank, data)

    def give_up(self, rank: int, why: str) -> None:
        """See RankLink."""
        who = self.ranks[rank]
        self.lose(RankLost(f"{self._name(who)} {why}{who.last_words}"))

    def send_to(self, rank: _Rank, data: bytes) -> None:
        """Send, waiting for room. What a rank that is gone does not get, its end tells."""
        with contextlib.suppress(OSError):
            rank.socket.sendall(data)

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def tell(self, listener: Listener) -> None:
        with self._losing:
            self.listener = listener
            loss = self.loss
        if loss is not None:
            listener.lose(loss)

    def lose(self, error: RankLost) -> None:
        """Kill all, and tell the reason, the first time."""
        with self._losing:
            if self.loss is not None or self._is_closing:
                return
            self.loss = error
        for rank in self.ranks:
            rank.process.kill()
        self.listener.lose(error)

    # ---- the thread --------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._start()
        except BaseException as error:
            self.error = error
        finally:
            self.started.set()
        try:
            while not self._is_closing and self.ranks:
                self._watch()
        except BaseException as error:
            self.lose(RankLost(f"the ranks' watch failed ({type(error).__name__}: {error})"))
        self._end()

    def _start(self) -> None:
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        for number, start in enumerate(self._starts):
            ours, theirs = socket.socketpair()
            with theirs:
                arguments = ["--socket", str(theirs.fileno()), *start.arguments]
                process = start_child(
                    "quire.engine.ranks.rank_main",
                    arguments,
                    None,
                    (theirs.fileno(), *start.fds),
                    self._log_level,
                    start.environment,
                    subprocess.PIPE,
                )
            if start.cpus is not None:
                os.sched_setaffinity(process.pid, start.cpus)
            rank = _Rank(number, process, ours, os.pidfd_open(process.pid))
            self.ranks.append(rank)
            assert process.stderr is not None
            os.set_blocking(process.stderr.fileno(), False)
            for file, see in (
                (ours, self._read),
                (process.stderr, self._pass_on),
                (rank.pidfd, self._bury),
            ):
                self._selector.register(file, selectors.EVENT_READ, (see, rank))

    def _watch(self) -> None:
        for key, _ in self._selector.select(LOOK_S):
            if key.data is None:
                self._wake_out.recv(64)
            else:
                see, rank = key.data
                see(rank)
        self.listener.tick()
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        for rank in self.ranks:
            if self.loss is None and rank.is_stopped(now_s):
                self.lose(RankLost(f"{self._name(rank)} was stopped (SIGSTOP) and cannot be used."))

    def _read(self, rank: _Rank) -> None:
        """Take what a rank sends."""
        try:
            data = rank.socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:  # its process ends, or has
            self._selector.unregister(rank.socket)
            return
        for body in rank.frames.feed(data):
            self._take(rank, body)

    def _take(self, rank: _Rank, body: bytes) -> None:
        message = self.codec.decode(body)
        if isinstance(message, Failed):
            rank.failed = message
        self.listener.hear(rank.number, message)
        if isinstance(message, Failed):
            self.lose(RankLost(f"{self._name(rank)} cannot continue{rank.last_words}"))

    def _pass_on(self, rank: _Rank) -> None:
        """Write what a rank has written on its stderr, and remember the end of it."""
        stderr = rank.process.stderr
        assert stderr is not None
        try:
            data = os.read(stderr.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(stderr)
            return
        *lines, rank.line = (rank.line + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            rank.last_lines.append(text)
            with contextlib.suppress(OSError, ValueError):
                print(f"{self._label(rank)}{text}", file=sys.stderr, flush=True)

    def _bury(self, rank: _Rank) -> None:
        """See to a rank that has ended: nothing can be computed any more."""
        self._selector.unregister(rank.pidfd)
        status = rank.process.wait()
        with contextlib.suppress(KeyError, EngineError):
            while rank.socket in self._selector.get_map():
                self._read(rank)  # what it still said
        stderr = rank.process.stderr
        assert stderr is not None
        if stderr in self._selector.get_map():
            self._pass_on(rank)
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self.lose(RankLost(f"{self._name(rank)} has ended ({how}){rank.last_words}"))

    def _name(self, rank: _Rank) -> str:
        return f"rank {rank.number} of {len(self._starts)} (process {rank.process.pid})"

    def _label(self, rank: _Rank) -> str:
        return f"rank {rank.number}: " if len(self._starts) > 1 else ""

    def _end(self) -> None:
        """End all: a rank goes when its stream ends; whoever is late is killed."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.socket.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + END_S
        for rank in self.ranks:
            try:
                rank.process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                    rank.process.wait(END_S)
        for rank in self.ranks:
            assert rank.process.stderr is not None
            rank.process.stderr.close()
            rank.socket.close()
            os.close(rank.pidfd)
        self._selector.close()


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
