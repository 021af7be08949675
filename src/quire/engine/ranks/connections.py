"""Authenticated TCP connections between a core and its ranks and node agents on other machines.

    core    MAGIC nonce                          -> \
            <- MAGIC nonce role rank proof          } sizes are fixed
    core    proof                                -> /
    both    messages, each after its length

Each side proves to the other that it has the secret of this start, by HMAC-SHA256 over both nonces.
The secret itself is never sent. Messages with a length are read only after both proofs. They are
neither encrypted nor signed, so the network between the machines must be trusted.

The core listens at one address, never at all of them. It disconnects a peer that fails to
authenticate within HANDSHAKE_TIMEOUT_S; each such peer occupies a thread until then.
"""

import contextlib
import enum
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.errors import EngineError

logger = logging.getLogger("quire")

MAGIC = b"quire-3\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ROLE = struct.Struct("<BI")
HANDSHAKE_TIMEOUT_S = 5.0  # timeout of connecting, and of a handshake's reads and writes
MAX_HANDSHAKES = 32  # peers that authenticate at the same time
SILENT_MS = 5_000  # data that an agent does not receive for this time ends the connection


class Unreachable(EngineError):
    """No core listens at an address yet."""


class Role(enum.IntEnum):
    """Purpose of a connection."""

    NODE_AGENT = 1  # control of a rank's node agent (engine/ranks/node_agent.py)
    RANK = 2  # plans and results
    STORE = 3  # calls to the rendezvous store (engine/ranks/rendezvous.py)
    STAGE = 4  # rows, from a rank to the rank of the same index in the next stage


@dataclass(frozen=True)
class Arrival:
    """Authenticated connection."""

    role: Role
    rank: int
    socket: socket.socket


@dataclass(frozen=True)
class Address:
    """Address of a listening process."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AuthenticatingListener:
    """Listener that authenticates peers. welcome: takes over the socket of each authenticated
    connection, on various threads. Raises EngineError if it cannot listen at the address."""

    def __init__(
        self, host: str, secret: bytes, welcome: Callable[[Arrival], None], port: int = 0
    ) -> None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise EngineError(
                f"ranks on other machines cannot be waited for at {Address(host, port)}:"
                f" {error.strerror or error}; it must be an address of this machine."
            ) from None
        found = self._listener.getsockname()
        self.address = Address(found[0], found[1])
        self._secret, self._welcome = secret, welcome
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._has_warned = self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="quire-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections. A second call does nothing."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        if self._thread is not threading.current_thread():
            self._thread.join(HANDSHAKE_TIMEOUT_S)  # before the descriptor's number can be reused
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            if not self._handshakes.acquire(blocking=False):
                self._refuse(sock, peer[0], "too many ranks connect at the same time")
                continue
            threading.Thread(target=self._prove, args=(sock, peer[0]), daemon=True).start()

    def _prove(self, sock: socket.socket, peer: str) -> None:
        try:
            arrival = authenticate(sock, self._secret)
        except (OSError, ValueError, EngineError) as error:
            self._refuse(sock, peer, str(error))
            return
        finally:
            self._handshakes.release()
        self._welcome(arrival)

    def _refuse(self, sock: socket.socket, peer: str, why: str) -> None:
        sock.close()
        if not self._has_warned:  # an unknown peer must not fill the log
            self._has_warned = True
            logger.warning(
                "a connection from %s to %s was refused: %s; further failures are not logged.",
                peer, self.address, why,
            )  # fmt: skip


def authenticate(sock: socket.socket, secret: bytes) -> Arrival:
    """Authenticate a connecting peer, and prove to it that this side has the secret too. Raises
    OSError, ValueError or EngineError if the handshake fails."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + own)
    data = _read(sock, len(MAGIC) + NONCE_BYTES + ROLE.size + PROOF_BYTES, deadline_s)
    head, proof = data[:-PROOF_BYTES], data[-PROOF_BYTES:]
    if not head.startswith(MAGIC):
        raise EngineError("it is not a quire rank, or it has another version")
    nonce = head[len(MAGIC) : -ROLE.size]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", own, head)):
        raise EngineError("it does not have the secret of this start")
    role, rank = ROLE.unpack(head[-ROLE.size :])
    sock.sendall(_proof(secret, b"core", nonce, own))
    arrival = Arrival(Role(role), rank, sock)
    _tune(sock, arrival.role)
    return arrival


def connect(address: Address, secret: bytes, role: Role, rank: int) -> socket.socket:
    """Connect to a core, and authenticate both sides. Raises Unreachable if no process answers,
    EngineError if it is not a core with this secret."""
    try:
        sock = socket.create_connection((address.host, address.port), HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise Unreachable(f"no core answers at {address}: {error}") from None
    try:
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        greeting = _read(sock, len(MAGIC) + NONCE_BYTES, deadline_s)
        if not greeting.startswith(MAGIC):
            raise EngineError(f"{address} is not a quire core, or it has another version.")
        their, own = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        head = MAGIC + own + ROLE.pack(role, rank)
        sock.sendall(head + _proof(secret, b"rank", their, head))
        proof = _read(sock, PROOF_BYTES, deadline_s)
        if not hmac.compare_digest(proof, _proof(secret, b"core", own, their)):
            raise EngineError(f"{address} does not have the secret of this start.")
    except OSError as error:
        sock.close()
        raise EngineError(
            f"{address} has refused the connection ({error}); is the secret of this start the same"
            " there?"
        ) from None
    except EngineError:
        sock.close()
        raise
    _tune(sock, role)
    return sock


def _proof(secret: bytes, side: bytes, nonce: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"quire " + side + b"\n" + nonce + transcript, hashlib.sha256)


def _read(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """Read `size` bytes before a deadline on the monotonic clock, however slowly they arrive."""
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _tune(sock: socket.socket, role: Role) -> None:
    """Set a socket to send at once, and to detect a lost machine by keep-alive packets. Unread data
    ends only connections of node agents: a computing rank may pause reading beyond SILENT_MS."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if role is Role.NODE_AGENT:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
