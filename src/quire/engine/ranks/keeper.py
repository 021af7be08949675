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
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.base.errors import ConfigError, EngineError
from quire.engine.ranks.dial_in import Address, Arrival, Door, Role, dial
from quire.engine.ranks.messages import (
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
    keeper_side,
)
from quire.engine.ranks.processes import STOPPED, RankChild, ended_with
from quire.engine.ranks.rank_set import LOOK_S
from quire.engine.wire.spawn import end_child
from quire.engine.wire.wire import Stream
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
        self._core, self._secret, self._place = core, secret, place
        self._stream = Stream(sock, keeper_side())
        self._farewell: Farewell | None = None
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
                self._stream.socket.shutdown(socket.SHUT_RDWR)
            return

    def _send(self, message: FromKeeper) -> None:
        """Send; what a core that is gone does not get, its end tells."""
        with contextlib.suppress(OSError):
            self._stream.send(message)

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
        messages = self._stream.receive()
        for message in messages or ():
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
        while self._farewell is None and select.select([self._stream.socket], [], [], WORDS_S)[0]:
            if self._hear() is None:
                return True
        return self._farewell is not None

    def _keep(self, order: StartRank) -> Ending:
        with contextlib.ExitStack() as stack:
            try:
                child = self._start(order, stack)
            except EngineError as error:
                self._send(RankEnded(f"could not be started: {error}"))
                return Ending(f"could not be started: {error}", of_rank=True)
            self._send(Started(child.process.pid))
            try:
                ending = self._watch(child)
            finally:
                end_child(child.process, 0.0)  # no request needs it any more
                child.close()
            self._send(RankEnded(ending.how))
            return ending

    def _start(self, order: StartRank, stack: contextlib.ExitStack) -> RankChild:
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
        environment = {**os.environ, **order.environment, **self._place.environment}
        child = RankChild(arguments, order.config, tuple(fds), order.log_level, environment)
        stack.close()
        return child

    def _watch(self, child: RankChild) -> Ending:
        """Pass on what it writes until it ends, stands still, or the core has ended; return which
        of it."""
        with selectors.DefaultSelector() as selector:
            for file in (self._stream.socket, child.stderr, child.pidfd):
                selector.register(file, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(LOOK_S)]
                if child.stderr in ready and not self._pass_on(child):
                    selector.unregister(child.stderr)
                if child.pidfd in ready:
                    self._pass_on(child)
                    return self._end_of_rank(child.process.wait())
                if self._stream.socket in ready and self._hear() is None:
                    return self._end_of_core()
                if child.is_stopped(time.monotonic()):
                    return Ending(STOPPED, of_rank=True)

    def _pass_on(self, child: RankChild) -> bool:
        """Send the lines that the rank has written. Return False at the end of its stderr."""
        lines = child.lines()
        for line in lines or ():
            self._send(Line(line))
        return lines is not None


def machine_name() -> str:
    """Return a name that processes of one machine, or of one container, share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
