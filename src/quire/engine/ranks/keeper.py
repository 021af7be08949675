"""A rank's keeper on another machine: it starts the rank, and tells the core how it fares.

    core <--- plans and results -------------------------> rank     not through the keeper
         <--- where it is, its lines, its end, alive ---   keeper -- starts, watches

The connections of the rank are made here and inherited by it, so the secret of the start is in the
keeper's memory alone. The kernel kills the rank when the thread that keeps it ends; the keeper ends
when the core's end of its connection does, or when the process that has started it ends.
"""

import contextlib
import logging
import os
import select
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.base.errors import ConfigError, EngineError
from quire.engine.ranks.dial_in import Address, Arrival, Door, Role, dial
from quire.engine.ranks.keeper_messages import (
    Alive,
    Farewell,
    FromKeeper,
    Here,
    Line,
    RankEnded,
    Refused,
    Started,
    StartRank,
    ToKeeper,
    keeper_frames,
    keeper_side,
)
from quire.engine.ranks.processes import CONFIRM_S, END_S, LOOK_S, READ_BYTES, state_of
from quire.engine.wire.spawn import start_child
from quire.runner.memory_plan import available_cpu_bytes

logger = logging.getLogger("quire")

CORE_ENDED = "the core has ended"
CORE_LOST = "the connection to the core ended without a message"
LEFT = "this machine was shut down"
WORDS_S = 0.5  # for the core to say why it ends, or to be gone, behind a rank that ended by itself
ALIVE_S = 0.5  # between two signs of life
STAGE_S = 300.0  # for the stage before to connect, which does so as soon as it starts


@dataclass(frozen=True)
class Place:
    """rank: which one is kept. has_before: there is a stage before it. environment: variables that
    it gets beside those of this process and the core's. settings: what this machine was told, which
    must be so on the core's. leaving: set when this machine is to end."""

    rank: int
    has_before: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    leaving: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Ending:
    """How it ended, in words. of_rank: they follow the name of the rank; else they are of all."""

    how: str
    of_rank: bool = False


def keep(core: Address, secret: bytes, place: Place) -> Ending:
    """Keep a rank until it ends, or the core does; returns how it ended. Call it on a thread that
    does nothing else. Raises EngineError if the core is not there, ConfigError if it refuses."""
    with dial(core, secret, Role.KEEPER, place.rank) as sock:
        return _Keeper(core, secret, place, sock).run()


class _Keeper:
    def __init__(self, core: Address, secret: bytes, place: Place, sock: socket.socket) -> None:
        self._core, self._secret, self._place, self._socket = core, secret, place, sock
        self._farewell: Farewell | None = None
        self._codec, self._frames = keeper_side(), keeper_frames()
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._host = sock.getsockname()[0]
        self._before: list[socket.socket] = []
        self._has_before = threading.Event()

    def run(self) -> Ending:
        """Start the rank when it is told to, and watch it."""
        door = None
        if self._place.has_before:
            door = Door(self._host, self._secret, self._connect_before)
        try:
            port = 0 if door is None else door.address.port
            settings = dict(self._place.settings)
            self._send(Here(self._host, machine_name(), available_cpu_bytes(), port, settings))
            threading.Thread(target=self._live, name="quire-alive", daemon=True).start()
            order = self._order()
            if order is None:
                return self._end_of_core()
            return self._keep(order)
        finally:
            self._over.set()
            if door is not None:
                door.close()

    def _connect_before(self, arrival: Arrival) -> None:
        if arrival.role is not Role.STAGE or self._before:
            arrival.socket.close()
            return
        self._before.append(arrival.socket)
        self._has_before.set()

    def _live(self) -> None:
        """Give signs of life; hang up when this machine is to end, or the process is gone that has
        started this one, which on another machine stands for its node."""
        parent = os.getppid()
        while not self._over.wait(ALIVE_S):
            if self._place.leaving.is_set():
                why = "was stopped, because its machine was shut down"
            elif os.getppid() != parent:
                why = "has lost its node: the process that started its node process has ended"
            else:
                self._send(Alive())
                continue
            self._send(RankEnded(why))
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            return

    def _send(self, message: FromKeeper) -> None:
        """Send; what a core that is gone does not get, its end tells."""
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(self._codec.encode(message))

    def _order(self) -> StartRank | None:
        """Wait for what is to be started; None if the core has ended. Raises ConfigError if it
        refuses."""
        while self._farewell is None and (messages := self._hear()) is not None:
            for message in messages:
                if isinstance(message, StartRank):
                    return message
                if isinstance(message, Refused):
                    raise ConfigError(
                        f"the core at {self._core} has refused rank {self._place.rank} of this"
                        f" machine: {message.why}"
                    )
        return None

    def _hear(self) -> list[ToKeeper] | None:
        """Wait for what the core says; None when its connection has ended."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        messages = [self._codec.decode(body) for body in self._frames.feed(data)]
        for message in messages:
            if isinstance(message, Farewell):
                self._farewell = message
        return messages

    def _end_of_core(self) -> Ending:
        """Return how the core has ended, once it has said so or its connection has ended."""
        if self._place.leaving.is_set():
            return Ending(LEFT)
        if self._farewell is None:
            return Ending(CORE_LOST)
        why = self._farewell.why
        return Ending(f"{CORE_ENDED}: {why}" if why else CORE_ENDED)

    def _end_of_rank(self, status: int) -> Ending:
        """Return how a rank has ended, which does so by itself when the core does."""
        if status == 0 and self._is_core_over():
            return self._end_of_core()
        return Ending(ended_with(status), of_rank=True)

    def _is_core_over(self) -> bool:
        """Tell whether the core has said that it ends, or is gone; waits for it a little."""
        while self._farewell is None and select.select([self._socket], [], [], WORDS_S)[0]:
            if self._hear() is None:
                return True
        return self._farewell is not None

    def _keep(self, order: StartRank) -> Ending:
        with contextlib.ExitStack() as stack:
            try:
                process = self._start(order, stack)
            except EngineError as error:
                self._send(RankEnded(f"could not be started: {error}"))
                return Ending(f"could not be started: {error}", of_rank=True)
            self._send(Started(process.pid))
            try:
                ending = self._watch(process)
            finally:
                process.kill()  # by its end too: nobody asks for anything any more
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                    process.wait(END_S)
            self._send(RankEnded(ending.how))
            return ending

    def _start(self, order: StartRank, stack: contextlib.ExitStack) -> "subprocess.Popen[bytes]":
        """Connect the rank, and start it. Its ends of the connections are its own afterwards."""
        with contextlib.suppress(OSError):
            os.chdir(order.directory)
        rank, core = self._place.rank, self._core
        plans = stack.enter_context(dial(core, self._secret, Role.RANK, rank))
        store = stack.enter_context(dial(core, self._secret, Role.STORE, rank))
        arguments = ["--socket", str(plans.fileno()), "--store", str(store.fileno())]
        arguments += ["--host", self._host]
        fds = [plans.fileno(), store.fileno()]
        if order.next_port:
            there = Address(order.next_host, order.next_port)
            behind = stack.enter_context(dial(there, self._secret, Role.STAGE, rank))
            arguments += ["--behind", str(behind.fileno())]
            fds.append(behind.fileno())
        if self._place.has_before:
            if not self._has_before.wait(STAGE_S):
                raise EngineError("the stage before did not connect")
            before = stack.enter_context(self._before[0])
            arguments += ["--before", str(before.fileno())]
            fds.append(before.fileno())
        process = start_child(
            "quire.engine.ranks.rank_main",
            arguments,
            order.config,
            tuple(fds),
            order.log_level,
            {**os.environ, **order.environment, **self._place.environment},
            subprocess.PIPE,
        )
        stack.close()
        return process

    def _watch(self, process: "subprocess.Popen[bytes]") -> Ending:
        """Pass on what it writes until it ends, stands still, or the core has ended; return which
        of it."""
        assert process.stderr is not None
        lines = _Lines(process.stderr.fileno(), self._send)
        stopped_since_s: float | None = None
        with process.stderr, selectors.DefaultSelector() as selector:
            ended = os.pidfd_open(process.pid)
            for file in (self._socket, process.stderr, ended):
                selector.register(file, selectors.EVENT_READ)
            try:
                while True:
                    ready = [key.fileobj for key, _ in selector.select(LOOK_S)]
                    if process.stderr in ready and not lines.pass_on():
                        selector.unregister(process.stderr)
                    if ended in ready:
                        lines.pass_on()
                        return self._end_of_rank(process.wait())
                    if self._socket in ready and self._hear() is None:
                        return self._end_of_core()
                    now_s = time.monotonic()
                    if state_of(process.pid) != "T":
                        stopped_since_s = None
                    elif stopped_since_s is None:
                        stopped_since_s = now_s
                    elif now_s - stopped_since_s >= CONFIRM_S:
                        return Ending("was stopped (SIGSTOP) and cannot be used", of_rank=True)
            finally:
                os.close(ended)


class _Lines:
    """Cuts what a rank writes into lines, and sends them."""

    def __init__(self, fd: int, send: Callable[[FromKeeper], None]) -> None:
        os.set_blocking(fd, False)
        self._fd, self._send, self._rest = fd, send, b""

    def pass_on(self) -> bool:
        """Send what is there; False at the end."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._send(Line(line.decode(errors="replace")))
        return bool(data)


def ended_with(status: int) -> str:
    """Say how a rank has ended, by its exit status."""
    return f"has ended ({f'signal {-status}' if status < 0 else f'exit status {status}'})"


def machine_name() -> str:
    """Return a name that processes of one machine, or of one container, share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
