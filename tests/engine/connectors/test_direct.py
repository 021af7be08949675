"""Blocks that a peer reads directly from another engine's memory. A transfer in this process can
lose, delay and damage blocks. If NIXL is installed, its transfer uses shared memory or TCP.

Covers `engine/connectors/direct.py` and `plugins/nixl_transfer.py`.
"""

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from quire.base.errors import ConfigError, MissingDependency
from quire.base.kv_orders import Fetched
from quire.engine.connectors import direct
from quire.engine.connectors.direct import DirectSource, DirectTransfer, Piece, Region
from quire.engine.connectors.make import make_store
from quire.engine.connectors.peer import PeerStore
from quire.engine.connectors.peer_wire import SECRET
from quire.engine.connectors.store import StoreError
from quire.engine.connectors.worker import StoreWorker
from tests.engine.connectors.test_peer import NUM_BLOCKS, Engine, got
from tests.support.engine.stores import (
    BLOCK_BYTES,
    FINGERPRINT,
    Answers,
    Memory,
    contents,
    fetch,
    key,
    sealed,
)

SIZE = BLOCK_BYTES[0]
HAS_NIXL = importlib.util.find_spec("nixl") is not None


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the secret that peers must know."""
    monkeypatch.setenv(SECRET, "a secret of these tests")


class PlacedMemory(Memory):
    """Memory whose blocks have addresses; only of group 0."""

    def __init__(self) -> None:
        super().__init__()
        self.all = (ctypes.c_char * (NUM_BLOCKS * SIZE))()

    def regions(self) -> list[Region]:
        return [(ctypes.addressof(self.all), NUM_BLOCKS * SIZE)]

    def address(self, group: int, block: int) -> int:
        assert group == 0
        return ctypes.addressof(self.all) + block * SIZE

    def read(self, group: int, block: int) -> bytes:
        return ctypes.string_at(self.address(group, block), SIZE)

    def write(self, group: int, block: int, data: memoryview) -> None:
        ctypes.memmove(self.address(group, block), bytes(data), SIZE)


class MemoryTransfer:
    """Copies within this process. before: called before each read. num_read: pieces read."""

    def __init__(self, name: str = "memory") -> None:
        self.name, self.num_read, self.peers = name, 0, [""]
        self.regions: list[Region] = []
        self.before: Callable[[Sequence[Piece]], None] = lambda pieces: None

    def register(self, regions: Sequence[Region]) -> None:
        self.regions += regions

    def describe(self) -> bytes:
        return self.name.encode()

    def connect(self, description: bytes) -> str:
        if description != self.name.encode():
            raise StoreError("it speaks another protocol.")
        self.peers.append(description.decode())
        return description.decode()

    def read(self, peer: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        assert peer in self.peers and timeout_s > 0
        self.before(pieces)
        for piece in pieces:
            self.copy(piece)
        self.num_read += len(pieces)

    def copy(self, piece: Piece) -> None:
        assert any(
            first <= piece.target and piece.target + piece.num_bytes <= first + num_bytes
            for first, num_bytes in self.regions
        ), "the target is not registered"
        ctypes.memmove(piece.target, piece.source, piece.num_bytes)

    def disconnect(self, peer: str) -> None:
        self.peers.remove(peer)

    def close(self) -> None:
        self.regions = []


def engine(transfer: DirectTransfer) -> Engine:
    memory = PlacedMemory()
    return Engine(memory=memory, direct=DirectSource(transfer, memory))


@pytest.fixture
def served() -> Iterator[Engine]:
    made = engine(MemoryTransfer())
    made.put(1, 2, 3)
    yield made
    made.close()


@pytest.fixture
def transfer() -> MemoryTransfer:
    return MemoryTransfer()


@pytest.fixture
def peer(served: Engine, transfer: MemoryTransfer) -> Iterator[PeerStore]:
    store = PeerStore(f"127.0.0.1:{served.port}", 1, transfer)
    yield store
    store.close()


def test_blocks_are_read_directly(
    served: Engine, peer: PeerStore, transfer: MemoryTransfer
) -> None:
    assert got(peer, 2, 9, 1) == [sealed(2), None, sealed(1)]
    assert got(peer, 9) == [None] and got(peer, 3) == [sealed(3)]
    assert transfer.num_read == 3
    peer.remove([key(3)])
    assert got(peer, 3) == [None]


def test_blocks_of_a_failed_transfer_are_read_over_tcp(
    served: Engine, peer: PeerStore, transfer: MemoryTransfer
) -> None:
    def lose(pieces: Sequence[Piece]) -> None:
        raise StoreError("the line is cut.")

    transfer.before = lose
    assert got(peer, 1, 2) == [sealed(1), sealed(2)]
    transfer.before = lambda pieces: None
    assert got(peer, 3) == [sealed(3)] and transfer.num_read == 0
    peer._disconnect()  # the next connection tries the transfer again
    assert got(peer, 3) == [sealed(3)] and transfer.num_read == 1
    transfer.before = lose
    for _ in range(direct.MAX_FAILURES):
        peer._disconnect()
        assert got(peer, 3) == [sealed(3)]
    transfer.before = lambda pieces: None
    peer._disconnect()
    assert got(peer, 3) == [sealed(3)] and transfer.num_read == 1, "too many failures"


def test_late_transfer_writes_to_an_unused_region(
    served: Engine, peer: PeerStore, transfer: MemoryTransfer
) -> None:
    late: list[Piece] = []

    def delay(pieces: Sequence[Piece]) -> None:
        late.extend(pieces)
        raise StoreError("it takes too long.")

    def arrive(pieces: Sequence[Piece]) -> None:
        for piece in late:
            transfer.copy(piece)

    transfer.before = delay
    assert got(peer, 1) == [sealed(1)]
    transfer.before = arrive
    peer._disconnect()
    assert got(peer, 2, 3) == [sealed(2), sealed(3)] and transfer.num_read == 2
    mine = range(transfer.regions[1][0], sum(transfer.regions[1]))
    assert late and not any(piece.target in mine for piece in late)


@pytest.mark.parametrize("how", ["damaged", "overwritten"])
def test_damaged_block_is_a_miss(
    how: str, served: Engine, peer: PeerStore, transfer: MemoryTransfer
) -> None:
    """It is damaged by the network, or because the engine reuses the block during the read."""

    def harm(pieces: Sequence[Piece]) -> None:
        if how == "overwritten":
            served.put(*range(10, 10 + NUM_BLOCKS))
        else:
            served.memory.all[5] = bytes([served.memory.all[5][0] ^ 1])  # type: ignore

    transfer.before = harm
    memory, answers = Memory(), Answers()
    worker = StoreWorker(peer, FINGERPRINT, memory, answers.give, answers.ring)
    worker.submit(fetch(1, 2))
    fetched = answers.take()
    assert isinstance(fetched, Fetched) and transfer.num_read == 2
    ok = [served.memory.read(0, i) == contents(i + 1) for i in (0, 1)]
    assert fetched.ok == ok and not all(ok)
    worker.close(5.0)


@pytest.mark.parametrize("theirs", [None, MemoryTransfer("another")])
def test_peer_without_the_same_transfer_is_read_over_tcp(
    theirs: DirectTransfer | None, transfer: MemoryTransfer
) -> None:
    made = Engine() if theirs is None else engine(theirs)
    made.put(1)
    peer = PeerStore(f"127.0.0.1:{made.port}", 1, transfer)
    assert got(peer, 1, 2) == [sealed(1), None] and transfer.num_read == 0
    peer.close()
    made.close()


def test_restarted_peer_is_read_again(transfer: MemoryTransfer) -> None:
    made = engine(MemoryTransfer())
    made.put(1)
    peer = PeerStore(f"127.0.0.1:{made.port}", 1, transfer)
    assert got(peer, 1) == [sealed(1)]
    made.close()
    with pytest.raises(StoreError):
        got(peer, 1)
    memory = PlacedMemory()
    source = DirectSource(MemoryTransfer(), memory)
    again = Engine(f"127.0.0.1:{made.port}", memory=memory, direct=source)
    again.put(2)
    assert got(peer, 1, 2) == [None, sealed(2)] and transfer.num_read == 2
    peer.close()
    again.close()


def test_unknown_or_missing_transfers_are_rejected() -> None:
    with pytest.raises(ConfigError, match="there is no transfer of KV blocks 'pigeon'"):
        make_store("peer://127.0.0.1:7?via=pigeon", 1)
    if not HAS_NIXL:
        with pytest.raises(MissingDependency, match="pip install 'quire"):
            make_store("peer://127.0.0.1:7?via=nixl", 1)


SERVER = """
import sys
from quire.engine.connectors.make import make_transfer
from tests.engine.connectors.test_direct import engine
served = engine(make_transfer("nixl"))
served.put(1, 2, 3)
print("port", served.port, flush=True)
sys.stdin.read()
served.close()
"""


@pytest.mark.skipif(not HAS_NIXL, reason="NIXL is not installed")
def test_nixl_reads_another_processs_memory() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        lines = iter(process.stdout.readline, "")
        port = next(line.split()[1] for line in lines if line.startswith("port"))
        peer = make_store(f"peer://127.0.0.1:{port}?via=nixl", 1)
        assert isinstance(peer, PeerStore) and peer._direct is not None
        assert got(peer, 2, 9, 1) == [sealed(2), None, sealed(1)]
        assert peer._direct.is_connected, "the blocks came by NIXL"
        process.kill()
        process.wait()
        with pytest.raises(StoreError):
            got(peer, 3)
        peer.close()
