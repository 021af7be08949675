"""Blocks of this engine's host memory, which it serves to its peers over TCP: `serve://HOST:PORT`.

A block that is stored here is not copied. It stays where the host tier has it, and peers
(`peer.py`) read it by its name until the tier reuses it (`host_index.py`). All blocks end with the
engine; then peers miss. Each connection has a thread, which only reads and sends: it never touches
scheduler or model.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from quire.base.errors import ConfigError
from quire.base.kv_orders import (
    Answer,
    Fetch,
    Fetched,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Remove,
    Removed,
)
from quire.engine.connectors.direct import DirectSource
from quire.engine.connectors.host_index import HostIndex
from quire.engine.connectors.peer_wire import (
    DESCRIBE,
    FIND,
    GET,
    LENGTH,
    LOCATION,
    LOCATIONS,
    NOTHING,
    greet,
    parse_address,
    receive_request,
    secret_for,
)

logger = logging.getLogger("quire")

MAX_CONNECTIONS = 64
GREETING_S, SEND_S = 2.0, 10.0  # maximum time for a peer to authenticate, and to receive
REST_S = 600.0  # between two requests
AGAIN_S = 0.2  # after a connection could not be accepted, for example with too many open files


class ServedBlocks:
    """Server of `serve://`: it carries out orders at once, on the core's thread, and answers peers.

    address: HOST:PORT. port: the actual port; the system chooses it if the address has port 0.
    direct: for peers that read the memory directly. answer, ring: as in `StoreWorker`.
    Raises ConfigError if it cannot listen on the address."""

    def __init__(
        self,
        address: str,
        index: HostIndex,
        answer: Callable[[Answer], None],
        ring: Callable[[], None],
        direct: DirectSource | None = None,
    ) -> None:
        host, port = parse_address("serve", address)
        self._secret = secret_for(host, "serve")
        self._index, self._answer_core, self._ring = index, answer, ring
        self._direct = direct
        self._lock = threading.Lock()  # guards the connections
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on serve://{address} ({error}); choose another port."
            ) from error
        self.port: int = self._listener.getsockname()[1]
        logger.info("KV blocks are served to peers at %s, port %d", host, self.port)
        threading.Thread(target=self._accept, name="quire-kv-serve", daemon=True).start()

    # ---- the core's orders -------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        self._answer_core(self._carry_out(order))
        self._ring()

    def _carry_out(self, order: Order) -> Answer:
        """Carry out an order. Look-ups and fetches always miss: the host tier has been searched
        before."""
        if isinstance(order, LookUp):
            found = [False] * len(order.names)
            return LookedUp(order.store, order.request_id, found, order.ticket)
        if isinstance(order, Fetch):
            return Fetched(order.store, order.ticket, [False] * len(order.items), 0, 0.0)
        if isinstance(order, Keep):
            pairs = [self._index.add(item) for item in order.items]
            ok, num_bytes = [is_stored for is_stored, _ in pairs], sum(num for _, num in pairs)
            return Kept(order.store, order.ticket, ok, num_bytes, 0.0, is_lasting=False)
        assert isinstance(order, Remove)
        self._index.remove(order.names)
        return Removed(order.store, order.ticket, [True] * len(order.names))

    def expire(self, now: float) -> None:
        """Do nothing: every order was answered."""

    @property
    def next_s(self) -> float | None:
        return None

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        for sock in (self._listener, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        if self._direct is not None:
            self._direct.close()

    # ---- peers -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(AGAIN_S):
                    return
                continue
            with self._lock:
                if self._closed.is_set() or len(self._connections) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                self._connections.add(sock)
            name = "quire-kv-peer"
            threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one peer until it disconnects or breaks the protocol."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet(sock, self._secret, GREETING_S)
            while True:
                sock.settimeout(REST_S)
                kind, keys = receive_request(sock)
                sock.settimeout(SEND_S)
                self._answer(sock, kind, keys)
        except OSError as error:
            logger.debug("a peer's connection has ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket, kind: int, keys: Sequence[bytes]) -> None:
        if kind == FIND:
            sock.sendall(bytes(self._index.find(keys)))
        elif kind == DESCRIBE:
            description = b"" if self._direct is None else self._direct.describe()
            sock.sendall(LENGTH.pack(len(description)) + description)
        elif kind == LOCATIONS:
            sock.sendall(b"".join(self._location(key) for key in keys))
        elif kind == GET:
            for key in keys:
                parts = self._index.read(key)
                if parts is None:
                    sock.sendall(LENGTH.pack(NOTHING))
                    continue
                header, data = parts
                sock.sendall(LENGTH.pack(len(header) + memoryview(data).nbytes) + header)
                sock.sendall(data)
        else:
            self._index.remove_keys(keys)
            sock.sendall(b"\1")

    def _location(self, key: bytes) -> bytes:
        """Return where a block is, with its header. The header's checksum is over the current
        bytes."""
        location, parts = self._index.location(key), self._index.read(key)
        if self._direct is None or location is None or parts is None:
            return LOCATION.pack(0, NOTHING)
        address = self._direct.address(location.group, location.block)
        return LOCATION.pack(address, memoryview(parts[1]).nbytes) + parts[0]
