"""Only ranks that know the secret of a core's start may connect to it over a network."""

import hashlib
import logging
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from quire.base.errors import EngineError
from quire.engine.ranks import connections
from quire.engine.ranks.connections import (
    MAGIC,
    ROLE,
    Address,
    Arrival,
    AuthenticatingListener,
    Role,
    authenticate,
    connect,
)

SECRET, OTHER = hashlib.sha256(b"one").digest(), hashlib.sha256(b"two").digest()
GREETING = len(MAGIC) + connections.NONCE_BYTES


@pytest.fixture
def arrivals() -> "SimpleQueue[Arrival]":
    return SimpleQueue()


@pytest.fixture
def core_listener(arrivals: "SimpleQueue[Arrival]") -> Iterator[AuthenticatingListener]:
    core_listener = AuthenticatingListener("127.0.0.1", SECRET, arrivals.put)
    yield core_listener
    core_listener.close()


def test_rank_with_the_secret_is_accepted(
    core_listener: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]"
) -> None:
    with connect(core_listener.address, SECRET, Role.STORE, 70_000) as sock:
        arrival = arrivals.get(timeout=5)
        assert (arrival.role, arrival.rank) == (Role.STORE, 70_000)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        arrival.socket.sendall(b"hello")
        assert sock.recv(5) == b"hello"
        arrival.socket.close()
        assert sock.recv(1) == b""


def test_rank_without_the_secret_is_rejected_and_logged_once(
    core_listener: AuthenticatingListener,
    arrivals: "SimpleQueue[Arrival]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(3):
            with pytest.raises(EngineError, match="is the secret of this start the same"):
                connect(core_listener.address, OTHER, Role.RANK, 0)
        with connect(core_listener.address, SECRET, Role.RANK, 0):
            assert arrivals.get(timeout=5).role is Role.RANK
    assert arrivals.empty()
    [line] = [record.getMessage() for record in caplog.records]
    assert "from 127.0.0.1" in line and "does not have the secret" in line


def test_strangers_are_disconnected_and_ranks_still_connect(
    core_listener: AuthenticatingListener,
    arrivals: "SimpleQueue[Arrival]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 0.3)
    whole = MAGIC + bytes(connections.NONCE_BYTES) + ROLE.pack(Role.RANK, 0) + bytes(32)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n" * 40, whole, whole[:50]):
        with socket.create_connection(
            (core_listener.address.host, core_listener.address.port), 5
        ) as stranger:
            stranger.sendall(sent)
            received = b""
            try:
                while more := stranger.recv(100):
                    received += more
            except ConnectionResetError:
                pass
            assert len(received) <= GREETING  # the core sends no proof to strangers
    assert arrivals.empty()
    with connect(core_listener.address, SECRET, Role.RANK, 1):
        assert arrivals.get(timeout=5).rank == 1


def test_handshake_of_a_slow_peer_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each single read of one byte succeeds."""
    now_s = [0.0]

    class Dripping(socket.socket):
        limit_s: float | None = None

        def settimeout(self, value: float | None) -> None:
            self.limit_s = value

        def sendall(self, data: object, flags: int = 0) -> None: ...

        def recv(self, bufsize: int, flags: int = 0) -> bytes:
            assert self.limit_s is not None
            if self.limit_s < 1:
                raise TimeoutError("timed out")
            now_s[0] += 1
            return b"x"

    monkeypatch.setattr(connections.time, "monotonic", lambda: now_s[0])
    with Dripping() as peer, pytest.raises(TimeoutError):
        authenticate(peer, SECRET)
    assert now_s == [connections.HANDSHAKE_TIMEOUT_S]


def test_connections_beyond_the_handshake_limit_are_closed(
    core_listener: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]"
) -> None:
    where = core_listener.address.host, core_listener.address.port
    strangers = [socket.create_connection(where, 5) for _ in range(connections.MAX_HANDSHAKES)]
    try:
        for stranger in strangers:
            assert stranger.recv(GREETING)  # the handshake has begun
        with socket.create_connection(where, 5) as late:
            assert late.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_core_must_prove_its_secret_too() -> None:
    """A core without the secret cannot use a rank's proof, nor echo it to the rank."""
    for echoes in (False, True):
        listener = socket.create_server(("127.0.0.1", 0))
        address = Address(*listener.getsockname())

        def serve(listener: socket.socket = listener, echoes: bool = echoes) -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(MAGIC + bytes(connections.NONCE_BYTES))
                reply = sock.recv(200)
                sock.sendall(reply[-32:] if echoes else bytes(32))
                sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineError, match="does not have the secret"):
            connect(address, SECRET, Role.RANK, 0)
        thread.join(5)
        listener.close()


def test_role_and_rank_are_part_of_the_proof() -> None:
    """An attacker in the middle cannot change the rank number, and the secret is never sent."""
    core, between_core = socket.socketpair()
    with core, between_core, socket.create_server(("127.0.0.1", 0)) as listener:
        errors: SimpleQueue[Exception] = SimpleQueue()

        def accept_rank() -> None:
            try:
                authenticate(core, SECRET)
            except EngineError as error:
                errors.put(error)

        def connect_rank() -> None:
            with pytest.raises(EngineError):
                connect(Address(*listener.getsockname()), SECRET, Role.RANK, 0)

        threads = [threading.Thread(target=each) for each in (accept_rank, connect_rank)]
        for thread in threads:
            thread.start()
        rank, _ = listener.accept()
        rank.sendall(between_core.recv(200))
        reply = rank.recv(200)
        assert SECRET not in reply
        between_core.sendall(reply.replace(ROLE.pack(Role.RANK, 0), ROLE.pack(Role.RANK, 1)))
        assert "does not have the secret" in str(errors.get(timeout=5))
        rank.close()
        for thread in threads:
            thread.join(5)


def test_listener_listens_only_at_its_address(core_listener: AuthenticatingListener) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", core_listener.address.port), 5)
    with pytest.raises(EngineError, match=r"192\.0\.2\.254:0.*must be an address of this machine"):
        AuthenticatingListener("192.0.2.254", SECRET, lambda arrival: None)
    core_listener.close()
    with pytest.raises(EngineError, match="no core answers at 127.0.0.1"):
        connect(core_listener.address, SECRET, Role.RANK, 0)
