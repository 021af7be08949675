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
def door(arrivals: "SimpleQueue[Arrival]") -> Iterator[AuthenticatingListener]:
    door = AuthenticatingListener("127.0.0.1", SECRET, arrivals.put)
    yield door
    door.close()


def test_who_knows_the_secret_is_let_in(
    door: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]"
) -> None:
    with connect(door.address, SECRET, Role.STORE, 70_000) as sock:
        arrival = arrivals.get(timeout=5)
        assert (arrival.role, arrival.rank) == (Role.STORE, 70_000)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        arrival.socket.sendall(b"hello")
        assert sock.recv(5) == b"hello"
        arrival.socket.close()
        assert sock.recv(1) == b""


def test_who_does_not_is_refused_and_told_of_once(
    door: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]", caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(3):
            with pytest.raises(EngineError, match="is the secret of this start the same"):
                connect(door.address, OTHER, Role.RANK, 0)
        with connect(door.address, SECRET, Role.RANK, 0):
            assert arrivals.get(timeout=5).role is Role.RANK
    assert arrivals.empty()
    [line] = [record.getMessage() for record in caplog.records]
    assert "from 127.0.0.1" in line and "does not have the secret" in line


def test_strangers_are_hung_up_on_and_others_come_in(
    door: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT_S", 0.3)
    whole = MAGIC + bytes(connections.NONCE_BYTES) + ROLE.pack(Role.RANK, 0) + bytes(32)
    for sent in (b"", b"GET / HTTP/1.1\r\n\r\n" * 40, whole, whole[:50]):
        with socket.create_connection((door.address.host, door.address.port), 5) as stranger:
            stranger.sendall(sent)
            received = b""
            try:
                while more := stranger.recv(100):
                    received += more
            except ConnectionResetError:
                pass
            assert len(received) <= GREETING  # no proof for nothing
    assert arrivals.empty()
    with connect(door.address, SECRET, Role.RANK, 1):
        assert arrivals.get(timeout=5).rank == 1


def test_a_peer_that_drips_bytes_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake ends in time, although each single read succeeds."""
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


def test_more_strangers_than_it_talks_to_are_hung_up_on_at_once(
    door: AuthenticatingListener, arrivals: "SimpleQueue[Arrival]"
) -> None:
    where = door.address.host, door.address.port
    strangers = [socket.create_connection(where, 5) for _ in range(connections.MAX_HANDSHAKES)]
    try:
        for stranger in strangers:
            assert stranger.recv(GREETING)  # it is talked to
        with socket.create_connection(where, 5) as late:
            assert late.recv(1) == b""
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_core_must_prove_itself_too() -> None:
    """One that knows no secret cannot use what a rank has said, nor send it its own words back."""
    for echoes in (False, True):
        listener = socket.create_server(("127.0.0.1", 0))
        address = Address(*listener.getsockname())

        def serve(listener: socket.socket = listener, echoes: bool = echoes) -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(MAGIC + bytes(connections.NONCE_BYTES))
                said = sock.recv(200)
                sock.sendall(said[-32:] if echoes else bytes(32))
                sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineError, match="does not have the secret"):
            connect(address, SECRET, Role.RANK, 0)
        thread.join(5)
        listener.close()


def test_what_a_connection_is_for_is_part_of_the_proof() -> None:
    """Nobody on the way can make another rank of it, and the secret does not cross."""
    core, between_core = socket.socketpair()
    with core, between_core, socket.create_server(("127.0.0.1", 0)) as listener:
        errors: SimpleQueue[Exception] = SimpleQueue()

        def let() -> None:
            try:
                authenticate(core, SECRET)
            except EngineError as error:
                errors.put(error)

        def dial_there() -> None:
            with pytest.raises(EngineError):
                connect(Address(*listener.getsockname()), SECRET, Role.RANK, 0)

        threads = [threading.Thread(target=each) for each in (let, dial_there)]
        for thread in threads:
            thread.start()
        rank, _ = listener.accept()
        rank.sendall(between_core.recv(200))
        said = rank.recv(200)
        assert SECRET not in said
        between_core.sendall(said.replace(ROLE.pack(Role.RANK, 0), ROLE.pack(Role.RANK, 1)))
        assert "does not have the secret" in str(errors.get(timeout=5))
        rank.close()
        for thread in threads:
            thread.join(5)


def test_it_listens_where_it_is_told_and_nowhere_else(door: AuthenticatingListener) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", door.address.port), 5)
    with pytest.raises(EngineError, match=r"192\.0\.2\.254:0.*must be an address of this machine"):
        AuthenticatingListener("192.0.2.254", SECRET, lambda arrival: None)
    door.close()
    with pytest.raises(EngineError, match="no core answers at 127.0.0.1"):
        connect(door.address, SECRET, Role.RANK, 0)
