"""Direct transfer of blocks from one engine's host memory to another's, without sockets, where the
network can do so (RDMA). This file has its interface, and the two sides that use it.

    peer      which memory?  ->  server   regions, registered once; how to reach them
    peer      where is it?   ->  server   address, and the header with the checksum
    peer      reads at that address, and checks the bytes, as it checks all values

The server is not involved in a read, and holds no block for it. A block that is overwritten
meanwhile has another checksum, which is a miss. If a direct transfer fails, TCP is used instead.
"""

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.engine.connectors.store import HEADER_BYTES, StoreError

logger = logging.getLogger("quire")

BUFFER_BYTES = 32 << 20  # maximum bytes of one read
READ_S = 1.0
MAX_FAILURES = 3  # then only TCP is used

Region = tuple[int, int]  # address, bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to read: from an address in the peer's memory to an address in ours."""

    source: int
    target: int
    num_bytes: int


class DirectTransfer(Protocol):
    """Reader of a peer's memory. All methods but `close` may raise StoreError. Only one thread
    calls it at a time."""

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory, so that peers can read it and `read` can write to it."""
        ...

    def describe(self) -> bytes:
        """Return what a peer needs to read the registered memory."""
        ...

    def connect(self, description: bytes) -> str:
        """Connect to the peer with this description, and return its name."""
        ...

    def read(self, peer: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Read all pieces, within `timeout_s`. After an error the targets may still be written
        to."""
        ...

    def disconnect(self, peer: str) -> None: ...
    def close(self) -> None: ...


class DirectMemory(Protocol):
    """Host memory with addresses (ops/blocks/host_blocks.py)."""

    def regions(self) -> list[Region]: ...
    def address(self, group: int, block: int) -> int: ...


class DirectSource:
    """Side whose memory is read. Any thread may call it."""

    def __init__(self, transfer: DirectTransfer, memory: DirectMemory) -> None:
        self._transfer, self._memory = transfer, memory
        self._lock = threading.Lock()
        self._description: bytes | None = None

    def describe(self) -> bytes:
        """Return the description of all host memory, registered in the first call. It is empty if
        that fails."""
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
    """Side that reads, into a buffer of its own."""

    def __init__(self, transfer: DirectTransfer) -> None:
        self._transfer = transfer
        self._peer: str | None = None
        self._buffer: ctypes.Array[ctypes.c_char] | None = None
        self._late: list[object] = []  # buffers that may still be written to
        self._num_failures = 0

    @property
    def may_connect(self) -> bool:
        return self._num_failures < MAX_FAILURES

    @property
    def is_connected(self) -> bool:
        return self._peer is not None

    def connect(self, description: bytes) -> None:
        """Connect to the peer. An error is logged, and then TCP is used."""
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
        self, locations: Sequence[tuple[int, int, bytes] | None]
    ) -> list[memoryview | None] | None:
        """Return the values: header and data. None: they must be read over TCP. locations: address,
        bytes, header."""
        found = [location for location in locations if location is not None]
        num_bytes = sum(length + HEADER_BYTES for _, length, _ in found)
        if self._peer is None or self._buffer is None or num_bytes > BUFFER_BYTES:
            return None
        view, base = memoryview(self._buffer).cast("B"), ctypes.addressof(self._buffer)
        values: list[memoryview | None] = []
        pieces, end = [], 0
        for location in locations:
            if location is None:
                values.append(None)
                continue
            source, length, header = location
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
        """Use TCP until the next connection. Late data may still be written to the buffer, so it is
        never used again."""
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
