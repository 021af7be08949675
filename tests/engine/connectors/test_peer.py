"""Blocks that one engine serves and another reads over TCP arrive unchanged. A peer without the
secret gets nothing. A malformed request ends its own connection only.

Covers `engine/connectors/host_index.py`, `engine/connectors/peer_wire.py` and
`engine/connectors/served.py`.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from quire.base.errors import ConfigError
from quire.base.kv_orders import Answer, Fetched, Keep, Kept, LookedUp, Order, Removed
from quire.engine.connectors import peer as peer_module
from quire.engine.connectors.direct import DirectSource
from quire.engine.connectors.host_index import HostIndex
from quire.engine.connectors.peer import PeerStore
from quire.engine.connectors.peer_wire import GET, MAGIC, SECRET, greet, introduce, request
from quire.engine.connectors.served import MAX_CONNECTIONS, ServedBlocks
from quire.engine.connectors.store import StoreError
from quire.kv.pool import BlockPool
from tests.support.engine.stores import (
    FINGERPRINT,
    Answers,
    Memory,
    contents,
    digest,
    fetch,
    key,
    look_up,
    remove,
    sealed,
)

NUM_BLOCKS = 8


class Engine:
    """Host memory that is served to peers. memory, direct: replace the defaults."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        memory: Memory | None = None,
        direct: DirectSource | None = None,
    ) -> None:
        self.memory, self.pool, self.answers = memory or Memory(), BlockPool(NUM_BLOCKS), Answers()
        index = HostIndex(FINGERPRINT, self.memory, [self.pool])
        self.blocks = ServedBlocks(address, index, self.answers.give, self.answers.ring, direct)
        self.port = self.blocks.port

    def put(self, *numbers: int) -> None:
        """Do what the host tier does with blocks, and let peers read them."""
        for i in numbers:
            block = self.pool.allocate()
            self.memory.write(0, block, memoryview(contents(i)))
            self.pool.index(block, digest(i))
            order = Keep(0, i, ((0, digest(i), block),))
            assert self.do(order) == Kept(0, i, [True], 1000, 0.0, is_lasting=False)
            assert self.do(order) == Kept(0, i, [True], 0, 0.0, is_lasting=False)
            self.pool.release(block)

    def do(self, order: Order) -> Answer:
        self.blocks.submit(order)
        return self.answers.take()

    def close(self) -> None:
        self.blocks.close(0.0)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the secret that peers must know."""
    monkeypatch.setenv(SECRET, "a secret of these tests")


@pytest.fixture
def served() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def peer(served: Engine) -> Iterator[PeerStore]:
    store = PeerStore(f"127.0.0.1:{served.port}", 1)
    yield store
    store.close()


def got(store: PeerStore, *numbers: int) -> list[bytes | None]:
    values = store.get([key(i) for i in numbers])
    return [None if value is None else bytes(value) for value in values]


def test_served_blocks_are_found_read_and_removed(served: Engine, peer: PeerStore) -> None:
    served.put(1, 2)
    assert peer.find([key(1), key(3), key(2)]) == [True, False, True]
    assert got(peer, 2, 3, 1) == [sealed(2), None, sealed(1)]
    assert peer.find([]) == got(peer) == []
    assert not peer.put(key(4), (contents(4),)), "a peer accepts no blocks"
    peer.remove([key(1), key(9)])
    assert peer.find([key(1), key(2)]) == [False, True]


def test_calls_with_many_keys_are_split(
    served: Engine, peer: PeerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.connectors.peer.MAX_KEYS", 2)
    served.put(1, 2, 3)
    assert peer.find([key(i) for i in range(5)]) == [False, True, True, True, False]
    assert got(peer, *range(5)) == [None, sealed(1), sealed(2), sealed(3), None]
    peer.remove([key(i) for i in range(5)])
    assert not any(peer.find([key(i) for i in range(5)]))


def test_peer_reads_correctly_after_an_abandoned_get(served: Engine, peer: PeerStore) -> None:
    served.put(1, 2, 3)
    values = peer.get([key(1), key(2), key(3)])
    assert bytes(next(values) or b"") == sealed(1)
    values.close()  # type: ignore[attr-defined]
    assert got(peer, 3) == [sealed(3)]


def test_evicted_and_removed_host_blocks_are_misses(served: Engine, peer: PeerStore) -> None:
    """Serving neither copies nor pins blocks: the oldest block is evicted even if peers read it."""
    served.put(*range(NUM_BLOCKS))
    served.put(10)
    numbers = [*range(NUM_BLOCKS), 10]
    assert peer.find([key(i) for i in numbers]) == [False] + [True] * NUM_BLOCKS
    assert got(peer, *numbers) == [None, *(sealed(i) for i in numbers[1:])]
    served.pool.forget(digest(3))  # its contents may be wrong
    assert got(peer, 3, 4) == [None, sealed(4)]
    assert served.do(remove(4, 99)) == Removed(0, 1, [True, True])
    assert got(peer, 4, 5) == [None, sealed(5)]
    served.pool.reset_index()
    assert not any(peer.find([key(i) for i in numbers]))


def test_block_overwritten_during_its_read_is_not_sent(served: Engine, peer: PeerStore) -> None:
    served.put(1, 2)
    read = served.memory.read

    def overwritten(group: int, block: int) -> bytes:
        data = read(group, block)
        served.put(*range(10, 10 + NUM_BLOCKS))  # overwrites all blocks
        served.memory.read = read  # type: ignore[method-assign]
        return data

    served.memory.read = overwritten  # type: ignore[method-assign]
    assert got(peer, 1, 2, 10) == [None, None, sealed(10)]


def test_block_that_lost_its_name_is_not_kept(served: Engine, peer: PeerStore) -> None:
    block = served.pool.allocate()
    order = Keep(0, 7, ((0, digest(1), block),))
    assert served.do(order) == Kept(0, 7, [False], 0, 0.0, is_lasting=False)
    served.pool.index(block, digest(2))  # the block has another name
    assert served.do(order) == Kept(0, 7, [False], 0, 0.0, is_lasting=False)
    assert peer.find([key(1), key(2)]) == [False, False]


def test_serving_engine_gets_misses_from_its_own_blocks(served: Engine) -> None:
    """It reads its host memory directly."""
    served.put(1)
    assert served.do(look_up(1)) == LookedUp(0, "r", [False])
    assert served.do(fetch(1)) == Fetched(0, 1, [False], 0, 0.0)


def test_peer_with_a_wrong_secret_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "right")
    served = Engine("127.0.0.1:0")
    served.put(1)
    address = f"127.0.0.1:{served.port}"
    trusted = PeerStore(address, 1)
    monkeypatch.setenv(SECRET, "wrong")
    stranger = PeerStore(address, 1)
    with pytest.raises(StoreError, match="another secret"):
        stranger.find([key(1)])
    assert got(trusted, 1) == [sealed(1)]
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.settimeout(5)
        sock.recv(40)
        sock.sendall(bytes(64) + request(GET, [key(1)]))
        with pytest.raises(ConnectionError):
            while sock.recv(1000):
                pass
            raise ConnectionError("closed")
    served.close()
    trusted.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "[::1]"])
@pytest.mark.parametrize("value", [None, "", "  "])
def test_secret_is_required_even_on_the_local_host(
    monkeypatch: pytest.MonkeyPatch, host: str, value: str | None
) -> None:
    """Every local user can reach the port."""
    if value is None:
        monkeypatch.delenv(SECRET)
    else:
        monkeypatch.setenv(SECRET, value)
    with pytest.raises(ConfigError, match=f"peer://.*Set the environment variable {SECRET}"):
        PeerStore(f"{host}:0", 1)
    with pytest.raises(ConfigError, match=f"serve://.*Set the environment variable {SECRET}"):
        Engine(f"{host}:0")


def test_secret_allows_all_interfaces() -> None:
    Engine("0.0.0.0:0").close()


def test_peer_with_an_empty_secret_gets_nothing(served: Engine) -> None:
    """Engines without a secret introduced themselves in this way."""
    served.put(1)
    with (
        socket.create_connection(("127.0.0.1", served.port)) as sock,
        pytest.raises(StoreError, match="another secret"),
    ):
        introduce(sock, b"")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x09\x01\0\0\0", b"\x02\xff\xff\xff\xff", b"\x02\x01"],
)
def test_malformed_request_ends_only_its_connection(
    sent: bytes, served: Engine, peer: PeerStore
) -> None:
    served.put(1)
    peer.find([key(0)])  # both sides have introduced themselves
    assert peer._sock is not None
    peer._sock.sendall(sent)
    with contextlib.suppress(OSError):  # it may have been ended already
        peer._sock.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreError):
        got(peer, 1)
    assert got(peer, 1) == [sealed(1)], "the next call connects again"


def test_foreign_server_and_closed_port_are_store_errors(peer: PeerStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(len(MAGIC) + 32))

        thread = threading.Thread(target=answer)
        thread.start()
        other = PeerStore(f"127.0.0.1:{listener.getsockname()[1]}", 1)
        with pytest.raises(StoreError, match="no quire engine serves"):
            other.find([key(1)])
        thread.join()
    with pytest.raises(StoreError, match="peer 127.0.0.1"):
        other.find([key(1)])  # the port is closed


def test_peer_reconnects_to_a_restarted_engine(served: Engine, peer: PeerStore) -> None:
    served.put(1)
    assert got(peer, 1) == [sealed(1)]
    served.close()
    with pytest.raises(StoreError):
        got(peer, 1)
    again = Engine(f"127.0.0.1:{served.port}")
    assert got(peer, 1) == [None]
    again.put(1)
    assert got(peer, 1) == [sealed(1)]
    again.close()


def test_excess_connections_are_refused_and_others_continue(
    served: Engine, peer: PeerStore
) -> None:
    served.put(1)
    peer.find([key(0)])
    endpoint = ("127.0.0.1", served.port)
    others = [socket.create_connection(endpoint) for _ in range(MAX_CONNECTIONS)]
    assert got(peer, 1) == [sealed(1)]
    late = PeerStore(f"127.0.0.1:{served.port}", 1)
    with pytest.raises(StoreError):
        late.find([key(1)])
    for sock in others:
        sock.close()


def test_invalid_and_taken_addresses_are_rejected() -> None:
    for text in ("", "host", "host:", ":7", "host:port", "host:99999"):
        with pytest.raises(ConfigError, match="takes HOST:PORT"):
            PeerStore(text, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="cannot listen on"):
            Engine(endpoint)


def test_slow_greeting_times_out() -> None:
    """Each byte comes in time, but the greeting as a whole does not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        num_sent, has_ended = 0, threading.Event()

        def send() -> None:
            nonlocal num_sent
            while num_sent < 64 and not has_ended.wait(0.05):
                theirs.sendall(b"x")
                num_sent += 1

        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(TimeoutError):
            greet(ours, b"", 0.3)
        has_ended.set()
        sender.join()
        assert 0 < num_sent < 64


@pytest.mark.parametrize("during", ["greeting", "find", "get"])
def test_slow_peer_times_out(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time; the exchange as a whole does not."""
    monkeypatch.setattr(peer_module, "CALL_S", 0.3)
    if during != "greeting":
        monkeypatch.setattr(peer_module, "introduce", lambda *given: None)
    has_ended, num_sent, max_sent = threading.Event(), 0, 64

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            nonlocal num_sent
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                while num_sent < max_sent and not has_ended.wait(0.05):
                    sock.sendall(MAGIC[:1] if during == "greeting" else b"\0")
                    num_sent += 1

        sender = threading.Thread(target=drip)
        sender.start()
        store = PeerStore(f"127.0.0.1:{listener.getsockname()[1]}", 1)
        keys = [key(number) for number in range(max_sent)]
        with pytest.raises(StoreError, match="takes too long|timed out"):
            store.find(keys) if during != "get" else list(store.get(keys))
        has_ended.set()
        sender.join()
        store.close()
    assert 0 < num_sent < 32
