"""The supervisor's side of several models: it carries out the decisions of `Residency`.

API processes connect to its Unix socket. Cores are children of the supervisor, which learns like
every client that a model is loaded: the core answers a connection with `Ready`.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from quire.base.errors import EngineError
from quire.engine.wire.child import NO_START
from quire.engine.wire.wire import READ_BYTES, Codec, Frames
from quire.serve.processes.children import Child, CoreChild
from quire.serve.processes.launch import END_S, FAILURE, StartFailure
from quire.serve.several.messages import (
    DEAD,
    FAILED,
    LOADING,
    UNLOADING,
    Deny,
    Grant,
    ModelState,
    RequestLease,
    States,
    ToManager,
    UnloadModel,
    manager_codec,
)
from quire.serve.several.residency import (
    Denied,
    Granted,
    NotifyHolder,
    Order,
    Residency,
    Start,
    Stop,
)

logger = logging.getLogger("quire")

READY_BYTES = 1  # bytes to read of `Ready`; any byte means that the model is loaded


class ModelManager:
    """Loader of models for API processes. cores: by the names of their models. listener: socket to
    which API processes connect. end_s: seconds in which a core must end after SIGTERM."""

    def __init__(
        self,
        residency: Residency,
        cores: Mapping[str, CoreChild],
        listener: socket.socket,
        end_s: float = END_S,
    ) -> None:
        self._residency = residency
        self._cores = cores
        self._listener = listener
        listener.setblocking(False)
        self._end_s = end_s
        self._codec = manager_codec()
        self._links: dict[int, _Link] = {}
        self._num_links = 0
        self._probes: dict[str, socket.socket] = {}  # connections to models that are loading
        self._kill_s: dict[str, float] = {}  # deadlines of models that are being stopped
        self._sent_states: list[ModelState] = []
        self.is_open = True

    def begin(self) -> None:
        """Start to load the first models, as many as may be loaded at once."""
        for core in self._cores.values():
            core.child.due_s = None
        for name in list(self._cores)[: self._residency.max_loaded]:
            self._residency.begin(name, time.monotonic())
            self._start(name)

    @property
    def states(self) -> list[ModelState]:
        now, unix = time.monotonic(), time.time()
        return [
            ModelState(each.name, each.state, each.why, unix - now + each.since_s, each.num_loads)
            for each in self._residency.models.values()
        ]

    @property
    def end_status(self) -> int | None:
        """Return the exit status if no model can be loaded any more, else None."""
        models = self._residency.models.values()
        if all(each.state == DEAD for each in models):
            return 1
        never = all(each.num_loads == 0 and not each.occupies_slot for each in models)
        return NO_START if never and any(each.state == FAILED for each in models) else None

    # ---- for the supervisor's loop -----------------------------------------------------------

    def fds(self) -> list[int]:
        """Return the descriptors to wait for."""
        if not self.is_open:
            return []
        links = (link.sock for link in self._links.values())
        return [sock.fileno() for sock in (self._listener, *self._probes.values(), *links)]

    def due_s(self) -> float:
        return min([self._residency.due_s(), *self._kill_s.values()])

    def look(self, readable: Collection[int]) -> None:
        """Read readable descriptors, kill overdue cores and carry out due decisions."""
        now = time.monotonic()
        if self._listener.fileno() in readable:
            self._accept()
        for number, link in list(self._links.items()):
            if link.sock.fileno() in readable:
                self._receive(number, link, now)
        for name, probe in list(self._probes.items()):
            if probe.fileno() in readable:
                self._read_probe(name, probe, now)
        for name in [name for name, at_s in self._kill_s.items() if now > at_s]:
            self._kill_s[name] = now + END_S
            logger.error("model %s does not stop; killing it", name)
            self._cores[name].child.kill()
        for order in self._residency.decide(now):
            self._carry_out(order)
        self._send_states()

    def bury(self, child: Child, status: int) -> bool:
        """Handle the end of a child process. Return False if it is not one of the cores."""
        for name, core in self._cores.items():
            if core.child is child:
                self._bury(name, child, status, time.monotonic())
                return True
        return False

    def close(self) -> None:
        """Start and stop no more models."""
        self.is_open = False
        for name in list(self._probes):
            self._close_probe(name)
        self._kill_s.clear()

    # ---- cores -------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        core = self._cores[name]
        with contextlib.suppress(OSError):
            (core.path.parent / FAILURE).unlink()
        logger.info("model %s is being loaded", name)
        try:
            self._open_probe(name)
        except OSError as error:
            logger.error("model %s cannot be loaded: its socket: %s", name, error)
            self._residency.failed(name, f"its socket: {error}.", time.monotonic())
            return
        core.child.due_s = 0.0

    def _open_probe(self, name: str) -> None:
        """Connect to a core, unless an earlier connection still waits to be accepted. The listener
        survives restarts of the core, and has room for few connections. Raises OSError."""
        if name in self._probes and _read(self._probes[name]) is None:
            return
        self._close_probe(name)
        self._probes[name] = probe = socket.socket(socket.AF_UNIX)
        probe.setblocking(False)
        try:
            probe.connect(str(self._cores[name].path))
        except OSError:
            self._close_probe(name)
            raise

    def _read_probe(self, name: str, probe: socket.socket, now: float) -> None:
        """Read the first byte from a loading core. `bury` handles a core that has ended."""
        data = _read(probe)
        if data is None:  # the descriptor's number belonged to a socket that was closed meanwhile
            return
        self._close_probe(name)
        resident = self._residency.models[name]
        if data and resident.state == LOADING:
            self._residency.loaded(name, now)
            logger.info("model %s is loaded (%.1f s)", name, resident.load_s)
        elif resident.state == LOADING:
            with contextlib.suppress(OSError):  # the old connection was to the previous core
                self._open_probe(name)

    def _close_probe(self, name: str) -> None:
        if name in self._probes:
            self._probes.pop(name).close()

    def _stop(self, name: str) -> None:
        logger.info("model %s is unloaded", name)
        self._cores[name].child.end()
        self._kill_s[name] = time.monotonic() + self._end_s

    def _bury(self, name: str, child: Child, status: int, now: float) -> None:
        self._kill_s.pop(name, None)
        resident = self._residency.models[name]
        status_text = f"signal {-status}" if status < 0 else f"exit status {status}"
        if resident.state == UNLOADING:
            if status != 0:
                logger.error("model %s stopped with an error (%s)", name, status_text)
            self._residency.unloaded(name, now)
        elif resident.state == LOADING:
            why = _last_words(self._cores[name].path.parent)
            why = why or f"its process ended ({status_text}) while it loaded the model."
            logger.error("model %s cannot be loaded: %s", name, why)
            self._residency.failed(name, why, now)
        else:
            logger.error("model %s: its process ended unexpectedly (%s)", name, status_text)
            self._follow_death(name, child, status_text, now)

    def _follow_death(self, name: str, child: Child, status_text: str, now: float) -> None:
        pause_s = child.plan_restart(now)
        if pause_s is None:
            why = f"its process ended unexpectedly ({status_text}) and is not restarted."
            logger.error("model %s is not restarted; the server continues without it", name)
            self._residency.died(name, why, now)
            return
        due_s = child.due_s
        why = f"its process ended unexpectedly ({status_text}); it is being loaded again."
        self._residency.begin(name, now, why)
        self._start(name)
        child.due_s = due_s

    def start_failed(self, child: Child, error: OSError) -> None:
        """Handle a process that could not be started."""
        for name, core in self._cores.items():
            if core.child is child:
                self._residency.failed(name, f"no process: {error}.", time.monotonic())

    # ---- API processes -----------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._num_links += 1
            link = self._links[self._num_links] = _Link(sock, self._codec)
            link.send(States(self.states))

    def _receive(self, number: int, link: "_Link", now: float) -> None:
        messages = link.receive()
        if messages is None:
            self._residency.forget(number, now)
            self._links.pop(number).sock.close()
            return
        for message in messages:
            lease = (number, message.lease)
            if message.model not in self._residency.models:
                continue
            if isinstance(message, RequestLease):
                self._residency.request(message.model, lease, now)
            else:
                self._residency.give_back(message.model, lease, now)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Start):
            self._start(order.model)
        elif isinstance(order, Stop):
            self._stop(order.model)
        elif isinstance(order, NotifyHolder):
            self._send(order.holder, UnloadModel(order.model))
        elif isinstance(order, Granted):
            self._send(order.lease[0], Grant(order.model, order.lease[1]))
        elif isinstance(order, Denied):
            self._send(order.lease[0], Deny(order.model, order.lease[1], order.why))

    def _send(self, number: int, message: msgspec.Struct) -> None:
        if number in self._links:
            self._links[number].send(message)

    def _send_states(self) -> None:
        last_sent = [
            (each.name, each.state, each.why, each.num_loads) for each in self._sent_states
        ]
        states = self.states
        if last_sent != [(each.name, each.state, each.why, each.num_loads) for each in states]:
            self._sent_states = states
            for link in self._links.values():
                link.send(States(states))


class _Link:
    """Connection of one API process. Messages are small and few, so a process that does not read
    them is faulty and is disconnected."""

    def __init__(self, sock: socket.socket, codec: Codec[ToManager]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._codec = codec
        self._frames = Frames()

    def receive(self) -> list[ToManager] | None:
        """Return the received messages; None if the connection has ended."""
        try:
            data = self.sock.recv(READ_BYTES)
            return [self._codec.decode(body) for body in self._frames.feed(data)] if data else None
        except BlockingIOError:
            return []
        except (OSError, EngineError):
            return None

    def send(self, message: msgspec.Struct) -> None:
        data = self._codec.encode(message)
        try:
            sent = self.sock.send(data)
        except OSError:
            sent = 0
        if sent < len(data):
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # `receive` then reports the end


def _read(probe: socket.socket) -> bytes | None:
    """Return the first byte from a core, b"" after a lost connection, None without data."""
    try:
        return probe.recv(READY_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _last_words(home: Path) -> str:
    """Return the error of a core that failed to start; empty if it reported none."""
    try:
        return msgspec.json.decode((home / FAILURE).read_bytes(), type=StartFailure).message
    except (OSError, msgspec.MsgspecError):
        return ""
