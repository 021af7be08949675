"""Blocks that this engine keeps in memory of its own process and serves to its peers over TCP.

`serve://HOST:PORT`: what the engine keeps is copied there, sealed; peers (`peer.py`) read it by
key. What was used longest ago is dropped first. All of it ends with the engine; then peers miss.
Each connection has a thread, which only reads and sends: it never touches scheduler or model.
"""

import contextlib
import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from quire.base.errors import ConfigError
from quire.engine.connectors.peer_wire import (
    FIND,
    GET,
    LENGTH,
    NOTHING,
    greet,
    parse_address,
    receive_request,
    secret_for,
)
from quire.engine.connectors.store import Buffer

logger = logging.getLogger("quire")

MOST_SHARE = 4  # the part of the machine's memory that blocks may take
MOST_CONNECTIONS = 64
GREETING_S, SEND_S = 2.0, 10.0  # how long a peer may take
REST_S = 600.0  # between two requests


class ServedStore:
    """Keeps sealed blocks in a dictionary. port: the one that it listens on, which the system
    chooses if the address says 0.

    Raises ConfigError for an address that cannot be listened on.
    """

    def __init__(self, address: str, max_bytes: int) -> None:
        host, port = parse_address("serve", address)
        self._secret = secret_for(host, "serve")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._most_bytes = min(max_bytes, memory // MOST_SHARE)
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards the three above, and the connections
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"serve://{address} cannot be listened on ({error}); choose another port."
            ) from error
        self.port: int = self._listener.getsockname()[1]
        logger.info("KV blocks are served to peers at %s, port %d", host, self.port)
        threading.Thread(target=self._accept, name="quire-kv-serve", daemon=True).start()

    # ---- the engine's own side ---------------------------------------------------------------

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._values for key in keys]

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        for key in keys:
            with self._lock:
                value = self._values.get(key)
                if value is not None:
                    self._values.move_to_end(key)
            yield value

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        value = b"".join(parts)
        if len(value) > self._most_bytes:
            return False
        with self._lock:
            self._num_bytes += len(value) - len(self._values.pop(key, b""))
            self._values[key] = value
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= len(self._values.popitem(last=False)[1])
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._num_bytes -= len(self._values.pop(key, b""))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for sock in (self._listener, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    # ---- peers -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            with self._lock:
                if self._is_closed or len(self._connections) >= MOST_CONNECTIONS:
                    sock.close()
                    continue
                self._connections.add(sock)
            name = "quire-kv-peer"
            threading.Thread(target=self._serve, args=(sock,), name=name, daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Answer one peer until it leaves, or does not keep to the protocol."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(GREETING_S)
            greet(sock, self._secret)
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
            sock.sendall(bytes(self.find(keys)))
        elif kind == GET:
            for value in self.get(keys):
                sock.sendall(LENGTH.pack(NOTHING if value is None else len(value)))
                if value is not None:
                    sock.sendall(value)
        else:
            self.remove(keys)
            sock.sendall(b"\1")
