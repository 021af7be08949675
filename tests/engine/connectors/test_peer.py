"""Blocks that one engine serves and another one reads over TCP: what comes is what was put, whoever
does not know the secret gets nothing, and whatever is no request ends that connection alone.

Covers `engine/connectors/peer_wire.py` and `engine/connectors/served.py`.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from quire.base.errors import ConfigError
from quire.engine.connectors.peer import PeerStore
from quire.engine.connectors.peer_wire import GET, MAGIC, SECRET, request
from quire.engine.connectors.served import MOST_CONNECTIONS, ServedStore
from quire.engine.connectors.store import HEADER_BYTES, StoreError
from tests.engine.connectors.stores import BLOCK_BYTES, contents, key, sealed

SIZE = HEADER_BYTES + BLOCK_BYTES[0]


@pytest.fixture
def served() -> Iterator[ServedStore]:
    store = ServedStore("127.0.0.1:0", 10 * SIZE)
    yield store
    store.close()


@pytest.fixture
def peer(served: ServedStore) -> Iterator[PeerStore]:
    store = PeerStore(f"127.0.0.1:{served.port}", 1)
    yield store
    store.close()


def put(store: ServedStore, *numbers: int) -> None:
    for i in numbers:
        value = sealed(i)
        assert store.put(key(i), (value[:HEADER_BYTES], value[HEADER_BYTES:]))


def got(store: PeerStore | ServedStore, *numbers: int) -> list[bytes | None]:
    values = store.get([key(i) for i in numbers])
    return [None if value is None else bytes(value) for value in values]


def test_what_was_put_is_found_and_read(served: ServedStore, peer: PeerStore) -> None:
    put(served, 1, 2)
    assert peer.find([key(1), key(3), key(2)]) == [True, False, True]
    assert got(peer, 2, 3, 1) == [sealed(2), None, sealed(1)] == got(served, 2, 3, 1)
    assert peer.find([]) == got(peer) == []
    assert not peer.put(key(4), (contents(4),)), "a peer keeps what it computes itself"
    peer.remove([key(1), key(9)])
    assert served.find([key(1), key(2)]) == [False, True]


def test_any_number_of_keys_may_be_asked_for(
    served: ServedStore, peer: PeerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.connectors.peer.MOST_KEYS", 2)
    put(served, 1, 2, 3)
    assert peer.find([key(i) for i in range(5)]) == [False, True, True, True, False]
    assert got(peer, *range(5)) == [None, sealed(1), sealed(2), sealed(3), None]
    peer.remove([key(i) for i in range(5)])
    assert not any(served.find([key(i) for i in range(5)]))


def test_who_stops_reading_gets_the_right_values_afterwards(
    served: ServedStore, peer: PeerStore
) -> None:
    put(served, 1, 2, 3)
    values = peer.get([key(1), key(2), key(3)])
    assert bytes(next(values) or b"") == sealed(1)
    values.close()  # type: ignore[attr-defined]
    assert got(peer, 3) == [sealed(3)]


def test_the_oldest_makes_room(served: ServedStore) -> None:
    put(served, *range(10))
    got(served, 0)  # used again
    put(served, 10, 10)
    assert served.find([key(i) for i in range(11)]) == [True, False] + [True] * 9
    assert not served.put(key(1), (bytes(11 * SIZE),))


def test_who_does_not_know_the_secret_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "right")
    served = ServedStore("127.0.0.1:0", 10 * SIZE)
    put(served, 1)
    address = f"127.0.0.1:{served.port}"
    knows = PeerStore(address, 1)
    monkeypatch.setenv(SECRET, "wrong")
    stranger = PeerStore(address, 1)
    with pytest.raises(StoreError, match="another secret"):
        stranger.find([key(1)])
    assert got(knows, 1) == [sealed(1)]
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.settimeout(5)
        sock.recv(40)
        sock.sendall(bytes(64) + request(GET, [key(1)]))
        with pytest.raises(ConnectionError):
            while sock.recv(1000):
                pass
            raise ConnectionError("closed")
    served.close()
    knows.close()


def test_beyond_this_machine_there_must_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    for make in (ServedStore, PeerStore):
        with pytest.raises(ConfigError, match=f"set the environment variable {SECRET}"):
            make("0.0.0.0:0", 1)
    monkeypatch.setenv(SECRET, "a secret")
    ServedStore("0.0.0.0:0", 1).close()


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x09\x01\0\0\0", b"\x02\xff\xff\xff\xff", b"\x02\x01"],
)
def test_what_is_no_request_ends_its_connection_alone(
    said: bytes, served: ServedStore, peer: PeerStore
) -> None:
    put(served, 1)
    peer.find([key(0)])  # they have introduced themselves
    assert peer._sock is not None
    peer._sock.sendall(said)
    with contextlib.suppress(OSError):  # it may have been ended already
        peer._sock.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreError):
        got(peer, 1)
    assert got(peer, 1) == [sealed(1)], "the next call connects anew"


def test_a_server_that_is_none_of_ours_or_cuts_values_off(peer: PeerStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(len(MAGIC) + 32))

        thread = threading.Thread(target=answer)
        thread.start()
        other = PeerStore(f"127.0.0.1:{listener.getsockname()[1]}", 1)
        with pytest.raises(StoreError, match="no engine of quire serves"):
            other.find([key(1)])
        thread.join()
    with pytest.raises(StoreError, match="peer 127.0.0.1"):
        other.find([key(1)])  # nobody listens


def test_a_peer_that_is_started_anew_is_found_again(served: ServedStore, peer: PeerStore) -> None:
    put(served, 1)
    assert got(peer, 1) == [sealed(1)]
    served.close()
    with pytest.raises(StoreError):
        got(peer, 1)
    again = ServedStore(f"127.0.0.1:{served.port}", 10 * SIZE)
    assert got(peer, 1) == [None]
    put(again, 1)
    assert got(peer, 1) == [sealed(1)]
    again.close()


def test_too_many_connections_are_refused_and_others_go_on(
    served: ServedStore, peer: PeerStore
) -> None:
    put(served, 1)
    peer.find([key(0)])
    place = ("127.0.0.1", served.port)
    others = [socket.create_connection(place) for _ in range(MOST_CONNECTIONS)]
    assert got(peer, 1) == [sealed(1)]
    late = PeerStore(f"127.0.0.1:{served.port}", 1)
    with pytest.raises(StoreError):
        late.find([key(1)])
    for sock in others:
        sock.close()


def test_addresses_are_checked() -> None:
    for text in ("", "host", "host:", ":7", "host:port", "host:99999"):
        with pytest.raises(ConfigError, match="takes HOST:PORT"):
            PeerStore(text, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot be listened on"):
            ServedStore(place, 1)
