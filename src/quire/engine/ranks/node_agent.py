"""Node agent of a rank on another machine: it starts the rank and reports its state to the core.

    core <--- plans and results -------------------------> rank     not through the agent
         <--- address, log lines, end, heartbeats -----   agent -- starts, watches

The agent opens the rank's connections and the rank inherits them, so only the agent's memory has
the secret of this start. The kernel kills the rank when the agent's thread ends. The agent ends
when the core closes its connection, or when the process that started the agent ends.
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
from quire.engine.ranks.connections import Address, Arrival, AuthenticatingListener, Role, connect
from quire.engine.ranks.messages import (
    Alive,
    Endpoint,
    Farewell,
    FromAgent,
    Line,
    RankEnded,
    Refused,
    Started,
    StartRank,
    Stream,
    ToAgent,
    agent_codec,
)
from quire.engine.ranks.processes import STOPPED, RankChild, ended_with
from quire.engine.ranks.rank_set import LOOK_S
from quire.engine.wire.spawn import end_child
from quire.runner.memory_plan import available_cpu_bytes

logger = logging.getLogger("quire")

CORE_ENDED = "the core has ended"
CORE_LOST = "the connection to the core ended without a message"
LEFT = "this machine was shut down"
FAREWELL_S = 0.5  # wait for the core's farewell or disconnection after a rank ended by itself
ALIVE_S = 0.5  # between two heartbeats
STAGE_S = 300.0  # timeout for the previous stage's connection, which it opens when it starts


@dataclass(frozen=True)
class RankAssignment:
    """Assignment of a rank to an agent. has_before: whether there is a previous stage. environment:
    variables added to the environments of this process and the core. settings: settings given on
    this machine, which the core's must equal. leaving: set when this machine shuts down."""

    rank: int
    has_before: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    leaving: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Ending:
    """Description of an end. of_rank: whether `end_text` concerns one rank and follows its name."""

    end_text: str
    of_rank: bool = False


def run_rank(core: Address, secret: bytes, assignment: RankAssignment) -> Ending:
    """Run a rank until it or the core ends, on a dedicated thread; return how it ended. Raises
    EngineError if the core cannot be reached, ConfigError if the core refuses the rank."""
    with connect(core, secret, Role.NODE_AGENT, assignment.rank) as sock:
        return _NodeAgent(core, secret, assignment, sock).run()


class _NodeAgent:
    def __init__(
        self, core: Address, secret: bytes, assignment: RankAssignment, sock: socket.socket
    ) -> None:
        self._core, self._secret, self._assignment = core, secret, assignment
        self._stream = Stream(sock, agent_codec())
        self._farewell: Farewell | None = None
        self._over = threading.Event()
        self._host = sock.getsockname()[0]
        self._before: list[socket.socket] = []
        self._has_before = threading.Event()

    def run(self) -> Ending:
        """Wait for the core's order, start the rank and watch it."""
        door = None
        if self._assignment.has_before:
            door = AuthenticatingListener(self._host, self._secret, self._connect_before)
        try:
            port = 0 if door is None else door.address.port
            settings = dict(self._assignment.settings)
            self._send(Endpoint(self._host, machine_name(), available_cpu_bytes(), port, settings))
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
        """Send heartbeats. Disconnect when this machine shuts down, or when the parent process
        ends: on another machine the parent represents the node."""
        parent = os.getppid()
        while not self._over.wait(ALIVE_S):
            if self._assignment.leaving.is_set():
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

    def _send(self, message: FromAgent) -> None:
        """Send a message; ignore a closed connection, which `_hear` detects."""
        with contextlib.suppress(OSError):
            self._stream.send(message)

    def _order(self) -> StartRank | None:
        """Wait for the order to start a rank; return None if the core has ended. Raises ConfigError
        if the core refuses the rank."""
        while self._farewell is None and (messages := self._hear()) is not None:
            for message in messages:
                if isinstance(message, StartRank):
                    return message
                if isinstance(message, Refused):
                    raise ConfigError(
                        f"the core at {self._core} has refused rank {self._assignment.rank} of this"
                        f" machine: {message.why}"
                    )
        return None

    def _hear(self) -> list[ToAgent] | None:
        """Wait for messages of the core, and note its farewell; None when the connection ended."""
        messages = self._stream.receive()
        for message in messages or ():
            if isinstance(message, Farewell):
                self._farewell = message
        return messages

    def _end_of_core(self) -> Ending:
        """Return how the core ended, after its farewell or the end of its connection."""
        if self._assignment.leaving.is_set():
            return Ending(LEFT)
        if self._farewell is None:
            return Ending(CORE_LOST)
        why = self._farewell.why
        return Ending(f"{CORE_ENDED}: {why}" if why else CORE_ENDED)

    def _end_of_rank(self, status: int) -> Ending:
        """Return how a rank ended. A rank exits with status 0 when the core ends."""
        if status == 0 and self._is_core_over():
            return self._end_of_core()
        return Ending(ended_with(status), of_rank=True)

    def _is_core_over(self) -> bool:
        """Return whether the core sent a farewell or disconnected; wait for it up to FAREWELL_S."""
        while (
            self._farewell is None and select.select([self._stream.socket], [], [], FAREWELL_S)[0]
        ):
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
                end_child(child.process, 0.0)  # kill at once: no request needs the rank
                child.close()
            self._send(RankEnded(ending.end_text))
            return ending

    def _start(self, order: StartRank, stack: contextlib.ExitStack) -> RankChild:
        """Open the rank's connections and start it. Afterwards only the rank has these sockets."""
        with contextlib.suppress(OSError):
            os.chdir(order.directory)
        rank, core = self._assignment.rank, self._core
        plans = stack.enter_context(connect(core, self._secret, Role.RANK, rank))
        store = stack.enter_context(connect(core, self._secret, Role.STORE, rank))
        arguments = ["--socket", str(plans.fileno()), "--store", str(store.fileno())]
        arguments += ["--host", self._host]
        fds = [plans.fileno(), store.fileno()]
        if order.next_port:
            there = Address(order.next_host, order.next_port)
            next_stage = stack.enter_context(connect(there, self._secret, Role.STAGE, rank))
            arguments += ["--next-stage", str(next_stage.fileno())]
            fds.append(next_stage.fileno())
        if self._assignment.has_before:
            if not self._has_before.wait(STAGE_S):
                raise EngineError("the stage before did not connect")
            before = stack.enter_context(self._before[0])
            arguments += ["--before", str(before.fileno())]
            fds.append(before.fileno())
        environment = {**os.environ, **order.environment, **self._assignment.environment}
        child = RankChild(arguments, order.config, tuple(fds), order.log_level, environment)
        stack.close()
        return child

    def _watch(self, child: RankChild) -> Ending:
        """Forward the rank's lines until the rank ends, the rank is stopped or the core ends.
        Return how it ended."""
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
        """Send the rank's new lines of stderr to the core. Return False at the end of stderr."""
        lines = child.lines()
        for line in lines or ():
            self._send(Line(line))
        return lines is not None


def machine_name() -> str:
    """Return a name that all processes of one machine or container share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
