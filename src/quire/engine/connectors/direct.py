"""Moving blocks from one engine's host memory into another's without either's sockets, where the
network can do so (RDMA): what such a transfer is, and the two sides that use it.

    peer      which memory?  ->  server   regions, registered once; how to reach them
    peer      where is it?   ->  server   address, and the header with the checksum
    peer      reads at that address, and checks what came, as it checks all values

The server takes no part in the reading, and holds nothing for it: a block that is overwritten
meanwhile has another checksum, which is a miss. Whatever fails here is done over TCP instead.
"""

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.connectors.store import HEADER_BYTES, StoreError

logger = logging.getLogger("quire")

BUFFER_BYTES = 32 << 20  # of what is read at once
READ_S = 1.0
MOST_FAILURES = 3  # then it is TCP for good

Region = tuple[int, int]  # address, bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to read: from an address of the peer's to one of ours."""

    source: int
    target: int
    num_bytes: int


class DirectTransfer(Protocol):
    """Reads a peer's memory. All but `close` may raise StoreError. One thread calls it at a
    time."""

    def register(self, regions: Sequence[Region]) -> None:
        """Let memory be read by peers, and be read into."""
        ...

    def describe(self) -> bytes:
        """Return what a peer must know to read what is registered."""
        ...

    def connect(self, description: bytes) -> str:
        """Get to know a peer; returns its name."""
        ...

    def read(self, peer: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read all pieces. After an error the targets may still be written to."""
        ...

    def disconnect(self, peer: str) -> None: ...
    def close(self) -> None: ...


class DirectMemory(Protocol):
    """Host memory with addresses (ops/blocks/host_blocks.py)."""

    def regions(self) -> list[Region]: ...
    def address(self, group: int, block: int) -> int: ...


class DirectSource:
    """The side that is read. Called from any thread."""

    def __init__(self, transfer: DirectTransfer, memory: DirectMemory) -> None:
        self._transfer, self._memory = transfer, memory
        self._lock = threading.Lock()
        self._description: bytes | None = None

    def describe(self) -> bytes:
        """Register all host memory, the first time; nothing if that cannot be done."""
        with self._lock:
            if self._description is None:
                try:
                    self._transfer.register(self._memory.regions())
                    self._description = self._transfer.describe()
                except StoreError as error:
                    logger.warning("KV blocks are sent to peers over TCP: %s", error)
                    self._description = b""
            return self._description

    def address(self, group: int, block: int) -> int:
        return self._memory.address(group, block)

    def close(self) -> None:
        with self._lock:
            self._transfer.close()


class DirectReader:
    """The side that reads, into a buffer of its own."""

    def __init__(self, transfer: DirectTransfer) -> None:
        self._transfer = transfer
        self._peer: str | None = None
        self._buffer: ctypes.Array[ctypes.c_char] | None = None
        self._late: list[object] = []  # buffers that may still be written to
        self._num_failures = 0

    @property
    def wants_peer(self) -> bool:
        return self._num_failures < MOST_FAILURES

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    def connect(self, description: bytes) -> None:
        """Get to know the peer. Whatever fails here is told, and leaves TCP."""
        if not description:
            return
        try:
            if self._buffer is None:
                self._buffer = (ctypes.c_char * BUFFER_BYTES)()
                self._transfer.register([(ctypes.addressof(self._buffer), BUFFER_BYTES)])
            self._peer = self._transfer.connect(description)
        except StoreError as error:
            self._give_up(error)

    def read(
        self, places: Sequence[tuple[int, int, bytes] | None]
    ) -> list[memoryview | None] | None:
        """Return the values: header and data. places: address, bytes, header. None: they are to be
        fetched over TCP."""
        found = [place for place in places if place is not None]
        num_bytes = sum(length + HEADER_BYTES for _, length, _ in found)
        if self._peer is None or self._buffer is None or num_bytes > BUFFER_BYTES:
            return None
        view, base = memoryview(self._buffer).cast("B"), ctypes.addressof(self._buffer)
        values: list[memoryview | None] = []
        pieces, end = [], 0
        for place in places:
            if place is None:
                values.append(None)
                continue
            source, length, header = place
            begin, data, end = end, end + HEADER_BYTES, end + HEADER_BYTES + length
            view[begin:data] = header
            pieces.append(Piece(source, base + data, length))
            values.append(view[begin:end])
        try:
            if pieces:
                self._transfer.read(self._peer, pieces, READ_S)
        except StoreError as error:
            self._give_up(error)
            return None
        return values

    def _give_up(self, error: StoreError) -> None:
        """Use TCP until there is another connection. The buffer is not used again: what is late may
        still come there."""
        logger.warning("KV blocks are received from a peer over TCP: %s", error)
        self._num_failures += 1
        self._late.append(self._buffer)
        self._buffer = None
        self.disconnect()

    def disconnect(self) -> None:
        if self._peer is not None:
            self._transfer.disconnect(self._peer)
            self._peer = None

    def close(self) -> None:
        self.disconnect()
        self._transfer.close()
