"""Server of a core's clients over a Unix socket, with one loop on one thread.

The loop waits only in `select`: for client messages, for the executor's bell, and for the time to
plan the next step. Each wait is bounded, so that an idle core renews its heartbeat too. A request
that arrives during a step is in the next plan. Each client gets one message per step, with the
outputs of its own requests. When a client disconnects, its requests end.
"""

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.base.clock import Clock, bounded_wait_s
from quire.base.errors import EngineBusy, EngineError, RequestError
from quire.base.kv_orders import KEEP_AT_END_S
from quire.base.messages import (
    Abort,
    Append,
    Cancel,
    Cancelled,
    CancelRequests,
    Done,
    FromCore,
    GetLive,
    GetMetrics,
    GetPrefixes,
    GetRetained,
    GetTimeline,
    HeldList,
    Live,
    Metrics,
    Prefixes,
    Ready,
    Refused,
    Request,
    SetPause,
    SetSleep,
    Steer,
    TimelineText,
    ToCore,
    UpdateWeights,
)
from quire.base.step_outputs import StepOutputs
from quire.engine.loop.core import EngineCore
from quire.engine.observability.heartbeat import Heartbeat
from quire.engine.observability.live import LiveFrames
from quire.engine.wire.core_choice import OpenLoad
from quire.engine.wire.wire import NO_RESOURCES, READ_BYTES, Codec, Frames, core_codec

MAX_READS = 16  # reads from one client before other clients and the next plan have their turn
NO_CLIENT = -1


class CoreConnection:
    """Core's end of one client's connection, which never waits for the client."""

    def __init__(self, sock: socket.socket, client_id: int, codec: Codec[ToCore]) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.client_id = client_id
        self._codec = codec
        self._frames = Frames()
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[ToCore] | None:
        """Return the messages received so far; None if the client has disconnected.

        Raises EngineError for a malformed message, after which the stream is unusable.
        """
        messages: list[ToCore] = []
        for _ in range(MAX_READS):
            try:
                data = self.socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return messages
            except OSError:
                return None
            if not data:
                return None
            messages += [self._codec.decode(body) for body in self._frames.feed(data)]
            if len(data) < READ_BYTES:
                break
        return messages

    def send(self, message: FromCore) -> None:
        """Send as much as the socket accepts now; `flush` sends the rest."""
        self._unsent += self._codec.encode(message)
        self.flush()

    def flush(self) -> None:
        """Send more of the unsent bytes, or drop them if the client has disconnected."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._unsent.clear()

    def close(self) -> None:
        self.socket.close()


class StepRouter:
    """Router of each step's outputs to clients.

    owner_of: returns the client of a request id; None if no client waits for its tokens.
    """

    def __init__(self, num_rows: int, owner_of: Callable[[str], int | None]) -> None:
        self._owner_of = owner_of
        self._owner_of_row = np.full(num_rows, NO_CLIENT, np.int64)

    def split(self, outputs: StepOutputs) -> dict[int, StepOutputs]:
        """Return the outputs by client, without clients that get no output."""
        named = [self._owner(name.request_id) for name in outputs.names]
        for name, owner in zip(outputs.names, named, strict=True):
            self._owner_of_row[name.row] = owner
        detailed = [self._owner(update.request_id) for update in outputs.details]
        owners = self._owner_of_row[outputs.rows.astype(np.int64)]  # int32 would take longer
        clients = _distinct(owners) | {*named, *detailed}
        if len(clients) == 1 and NO_CLIENT not in clients:
            return {clients.pop(): outputs}
        return {
            client: StepOutputs(
                outputs.rows[owners == client],
                outputs.token_ids[owners == client],
                [n for n, owner in zip(outputs.names, named, strict=True) if owner == client],
                [u for u, owner in zip(outputs.details, detailed, strict=True) if owner == client],
            )
            for client in clients - {NO_CLIENT}
        }

    def _owner(self, request_id: str) -> int:
        owner = self._owner_of(request_id)
        return NO_CLIENT if owner is None else owner


def _distinct(owners: npt.NDArray[np.int64]) -> set[int]:
    if len(owners) and not np.count_nonzero(owners != owners[0]):
        return {int(owners[0])}
    return set(np.unique(owners).tolist())


logger = logging.getLogger("quire")

ACCEPT_PAUSE_S = 1.0  # pause after `accept` lacked resources


class StatusSource(Protocol):
    def line(self, now_s: float) -> str | None: ...


@dataclass(frozen=True)
class CoreReports:
    """Reports of a core. metrics_text: metrics for Prometheus. status: lines for the log; None: no
    lines. heartbeat: for the watcher. timeline_text: timeline of a request id for a tenant."""

    metrics_text: Callable[[], str]
    status: StatusSource | None = None
    heartbeat: Heartbeat | None = None
    timeline_text: Callable[[str, str | None], str] = lambda request_id, tenant: ""


Reply = Callable[[FromCore], None]
ORDERS = (UpdateWeights, SetPause, SetSleep)  # of a trainer
Handlers = Mapping[type, Callable[[Any, Reply], None]]  # by type, for `ORDERS`


class CoreServer:
    """Server of an `EngineCore` for clients that connect to `listener`, a listening Unix socket.

    handlers: functions that take a trainer's orders, each with a function to reply."""

    def __init__(
        self,
        core: EngineCore,
        listener: socket.socket,
        ready: Ready,
        reports: CoreReports,
        clock: Clock,
        handlers: Handlers = MappingProxyType({}),
    ) -> None:
        self.core = core
        self._listener = listener
        self.ready = ready
        self._reports = reports
        self._clock = clock
        self._handlers = handlers
        self._live = LiveFrames(core, clock)
        self._codec = core_codec()
        self._clients: dict[int, CoreConnection] = {}
        self._owners: dict[str, int] = {}  # request id -> client
        self._load = OpenLoad()  # of these requests
        self._router = StepRouter(ready.max_num_seqs, self._owners.get)
        self._num_clients = 0
        self._stopping = False
        self._accept_again_s: float | None = None
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        core.bell.wake_up = self._wake

    def run(self) -> None:
        """Serve until `stop`. Raises EngineError if the core cannot continue."""
        try:
            while not self._stopping:
                self._poll(self._wait_s())
                if self.core.has_work or self.core.rest_s() == 0.0:
                    self._advance()
        finally:
            if self._reports.heartbeat is not None:
                self._reports.heartbeat.wait(self._clock.now(), KEEP_AT_END_S)
            for client in list(self._clients.values()):
                client.close()
            self._listener.close()
            self._selector.close()

    def stop(self) -> None:
        """End `run` after the current step. Signal handlers and other threads may call it."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        """Make `select` return; any thread may call it."""
        with contextlib.suppress(OSError):  # a full socket wakes it too; or the socket is closed
            self._wake_in.send(b"x")

    def _wait_s(self) -> float:
        """Return how long to wait for the next event. With no step in flight, also set the
        heartbeat's deadline; a step in flight keeps its own."""
        wait_s, heartbeat = bounded_wait_s(self.core.rest_s()), self._reports.heartbeat
        if heartbeat is not None and not self.core.num_in_flight:
            heartbeat.wait(self._clock.now(), wait_s)
        return wait_s

    def _advance(self) -> None:
        heartbeat, status = self._reports.heartbeat, self._reports.status
        has_plans = self.core.num_in_flight > 0  # plans in flight keep their deadline
        if heartbeat is not None and not has_plans:
            heartbeat.begin(self._clock.now())
        self.core.advance(self._send)
        if status is not None and (line := status.line(self._clock.now())) is not None:
            logger.info("%s", line)

    # ---- messages out ------------------------------------------------------------------------

    def _send(self, outputs: StepOutputs) -> None:
        """Send one message to each client with outputs."""
        messages = self._router.split(outputs)
        for update, _ in outputs.finished:  # all sequences of a request may have ended in this step
            self._forget(update.request_id)
        for client_id, message in messages.items():
            client = self._clients.get(client_id)
            if client is not None:
                client.send(message)
                self._watch(client)

    def _forget(self, request_id: str) -> None:
        """Forget a request's client once the last of its sequences has ended."""
        if not self.core.has(request_id):
            self._disown(request_id)

    def _disown(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._load.remove(request_id)
        self._report_load()

    def _report_load(self) -> None:
        if self._reports.heartbeat is not None:
            self._reports.heartbeat.report_load(self._load.total)

    def _watch(self, client: CoreConnection) -> None:
        """Poll a client's socket for room only while it has unsent bytes."""
        watched = selectors.EVENT_READ
        if client.has_unsent:
            watched |= selectors.EVENT_WRITE
        if self._selector.get_key(client.socket).events != watched:
            self._selector.modify(client.socket, watched, client)

    # ---- messages in -------------------------------------------------------------------------

    def _poll(self, timeout_s: float) -> None:
        if self._accept_again_s is not None and self._accept_again_s <= self._clock.now():
            self._accept_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for key, events in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_out:
                self._wake_out.recv(64)
            else:
                self._serve(key.data, events)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # no resources, or the client has disconnected already
            if error.errno in NO_RESOURCES:
                self._rest_from_accepting(error)
            return
        client = CoreConnection(sock, self._num_clients, self._codec)
        self._num_clients += 1
        self._clients[client.client_id] = client
        self._selector.register(sock, selectors.EVENT_READ, client)
        client.send(msgspec.structs.replace(self.ready, client_id=client.client_id))
        self._watch(client)

    def _rest_from_accepting(self, error: OSError) -> None:
        """Pause accepting for ACCEPT_PAUSE_S; otherwise `select` would return at once each time."""
        self._selector.unregister(self._listener)
        self._accept_again_s = self._clock.now() + ACCEPT_PAUSE_S
        logger.error(
            "the engine cannot accept a connection (%s); it tries again every %g s, and open"
            " connections continue.",
            error.strerror, ACCEPT_PAUSE_S,
        )  # fmt: skip

    def _serve(self, client: CoreConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            client.flush()
            self._watch(client)
        if not events & selectors.EVENT_READ:
            return
        try:
            messages = client.receive()
        except EngineError as error:
            logger.error("client %d was disconnected: %s", client.client_id, error)
            messages = None
        if messages is None:
            self._drop(client)
            return
        for message in messages:
            self._take(client, message)
        self._watch(client)

    def _take(self, client: CoreConnection, message: ToCore) -> None:
        if isinstance(message, Request):
            self._add(client, message)
        elif isinstance(message, GetMetrics):
            self.core.publish()
            client.send(Metrics(message.question_id, self._reports.metrics_text()))
        elif isinstance(message, GetTimeline):
            self.core.publish()
            text = self._reports.timeline_text(message.request_id, message.tenant)
            client.send(TimelineText(message.question_id, text))
        elif isinstance(message, GetLive):
            client.send(Live(message.question_id, self._live.frame()))
        elif isinstance(message, GetPrefixes):
            client.send(Prefixes(message.question_id, self.core.prefixes(message.tenant)))
        elif isinstance(message, GetRetained):
            found = self.core.held(message.request_id, message.index, message.tenant)
            client.send(HeldList(message.question_id, found))
        elif isinstance(message, CancelRequests):
            requests = [each.request for each in self.core.requests()]
            names = [each.request_id for each in requests if message.matches(each)]
            for name in names:
                self.core.control(Cancel(name))
            client.send(Cancelled(message.question_id, names))
        elif isinstance(message, Abort):
            if self._owners.get(message.request_id) == client.client_id:
                self.core.control(message)
                if message.index < 0:
                    self._disown(message.request_id)
                else:
                    self._forget(message.request_id)
        elif isinstance(message, Append):
            if self._owners.get(message.request_id) == client.client_id:
                self._append(client, message)
        elif isinstance(message, Steer):
            if self._owners.get(message.request_id) == client.client_id:
                self.core.control(message)
        elif isinstance(message, ORDERS):
            handle = self._handlers.get(type(message), _refuse)
            handle(message, lambda reply: self._reply(client, reply))
        else:
            self.core.control(message)

    def _reply(self, client: CoreConnection, message: FromCore) -> None:
        """Send a message to a client that may have disconnected since it asked."""
        if client.client_id in self._clients:
            client.send(message)
            self._watch(client)

    def announce(self, message: FromCore) -> None:
        """Send a message to all clients, between two steps."""
        for client in list(self._clients.values()):
            self._reply(client, message)

    def _append(self, client: CoreConnection, message: Append) -> None:
        """Pass appended prompt tokens to the core; if they are invalid, abort the request."""
        try:
            self.core.limits.check_piece(message.token_ids, 0)
            self.core.control(message)
        except RequestError as error:
            client.send(_refused(message.request_id, error))
            self.core.control(Abort(message.request_id))
            self._disown(message.request_id)

    def _add(self, client: CoreConnection, request: Request) -> None:
        try:
            self.core.add(request)
        except RequestError as error:
            client.send(_refused(request.request_id, error))
        else:
            self._owners[request.request_id] = client.client_id
            self._load.add(request)
            self._report_load()

    def _drop(self, client: CoreConnection) -> None:
        """Remove a disconnected client and abort its requests."""
        self._selector.unregister(client.socket)
        client.close()
        del self._clients[client.client_id]
        mine = [name for name, owner in self._owners.items() if owner == client.client_id]
        for request_id in mine:
            self._disown(request_id)
            self.core.control(Abort(request_id))


def _refuse(message: UpdateWeights | SetPause | SetSleep, reply: Reply) -> None:
    reply(Done(message.question_id, "this engine does not take this order."))


def _refused(request_id: str, error: RequestError) -> Refused:
    return Refused(request_id, str(error), isinstance(error, EngineBusy), error.field, error.code)
