"""Connections over a network, of a core with those that hold its ranks elsewhere.

    core    MAGIC nonce                          -> \
            <- MAGIC nonce role rank proof          } sizes are fixed
    core    proof                                -> /
    both    messages, each behind its length

Each side proves to the other that it knows the secret of this start, by HMAC-SHA256 over both
nonces; the secret itself does not cross. Only then is anything read that has a length. What crosses
afterwards is neither encrypted nor signed: the network between machines must be a trusted one.

The core listens at one address, never at all of them. Who fails or is slow is closed, and costs a
thread for LIMIT_S.
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
from collections.abc import Callable
from dataclasses import dataclass

from quire.base.errors import EngineError

logger = logging.getLogger("quire")

MAGIC = b"quire-2\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ROLE = struct.Struct("<BI")
LIMIT_S = 5.0  # for all of it
MOST_STRANGERS = 32  # who prove themselves at the same time
SILENT_MS = 5_000  # what a keeper is sent and does not receive for so long ends the connection


class Unreachable(EngineError):
    """Nobody listens at an address, yet."""


class Role(enum.IntEnum):
    """What a connection is for."""

    KEEPER = 1  # a rank's keeper (engine/ranks/keeper.py)
    RANK = 2  # plans and results
    STORE = 3  # what ranks tell each other to meet (engine/ranks/meeting.py)
    STAGE = 4  # rows, from a rank to the one in its place on the next stage


@dataclass(frozen=True)
class Arrival:
    """A connection that has proved itself."""

    role: Role
    rank: int
    socket: socket.socket


@dataclass(frozen=True)
class Address:
    """Where somebody listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Door:
    """Listens at an address of this machine. welcome: called for each arrival, on threads of its
    own, and owns its socket then. Raises EngineError if it cannot listen there."""

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
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._has_warned = self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="quire-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take nobody any more. A second call does nothing."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        if self._thread is not threading.current_thread():
            self._thread.join(LIMIT_S)  # or it might accept at whatever gets this number next
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            if not self._strangers.acquire(blocking=False):
                self._refuse(sock, peer[0], "too many ranks connect at the same time")
                continue
            threading.Thread(target=self._prove, args=(sock, peer[0]), daemon=True).start()

    def _prove(self, sock: socket.socket, peer: str) -> None:
        try:
            arrival = let_in(sock, self._secret)
        except (OSError, ValueError, EngineError) as error:
            self._refuse(sock, peer, str(error))
            return
        finally:
            self._strangers.release()
        self._welcome(arrival)

    def _refuse(self, sock: socket.socket, peer: str, why: str) -> None:
        sock.close()
        if not self._has_warned:  # a stranger must not fill the log
            self._has_warned = True
            logger.warning(
                "a connection from %s to %s was refused: %s; further failures are not logged.",
                peer, self.address, why,
            )  # fmt: skip


def let_in(sock: socket.socket, secret: bytes) -> Arrival:
    """Let a peer prove itself, and prove to it that this is who it looks for. Raises OSError,
    ValueError and EngineError."""
    sock.settimeout(LIMIT_S)
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(MAGIC + own)
    data = _read(sock, len(MAGIC) + NONCE_BYTES + ROLE.size + PROOF_BYTES)
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


def dial(address: Address, secret: bytes, role: Role, rank: int) -> socket.socket:
    """Connect. Raises Unreachable if nobody answers there, EngineError if somebody else does."""
    try:
        sock = socket.create_connection((address.host, address.port), LIMIT_S)
    except OSError as error:
        raise Unreachable(f"no core answers at {address}: {error}") from None
    try:
        sock.settimeout(LIMIT_S)
        greeting = _read(sock, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise EngineError(f"{address} is not a quire core, or it has another version.")
        their, own = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        head = MAGIC + own + ROLE.pack(role, rank)
        sock.sendall(head + _proof(secret, b"rank", their, head))
        if not hmac.compare_digest(_read(sock, PROOF_BYTES), _proof(secret, b"core", own, their)):
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


def _proof(secret: bytes, whose: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, b"quire " + whose + b"\n" + nonce + said, hashlib.sha256)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _tune(sock: socket.socket, role: Role) -> None:
    """Send at once, and notice a machine that is gone. What a rank computes may take longer than a
    keeper may be silent, so only of keepers it is asked that they read all the time."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, 3),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if role is Role.KEEPER:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
