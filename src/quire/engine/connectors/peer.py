"""Store of another engine's blocks, which that engine serves (`served.py`): `peer://HOST:PORT`.

Nothing is put there: a peer keeps the blocks that it computes itself. A peer that is unreachable or
was restarted is a miss; each call tries it once. Each exchange has a time limit, so that a peer
that sends a byte now and then delays no request. The limit is CALL_S, plus the time of its values
at MIN_BYTES_PER_S.
"""

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence

from quire.engine.connectors.direct import DirectReader, DirectTransfer
from quire.engine.connectors.disk import MAX_VALUE_BYTES
from quire.engine.connectors.peer_wire import (
    DESCRIBE,
    FIND,
    GET,
    LENGTH,
    LOCATION,
    LOCATIONS,
    MAX_DESCRIPTION_BYTES,
    MAX_KEYS,
    NOTHING,
    REMOVE,
    introduce,
    parse_address,
    receive,
    request,
    secret_for,
)
from quire.engine.connectors.store import HEADER_BYTES, Buffer, StoreError

CONNECT_S, CALL_S = 0.5, 1.5
MIN_BYTES_PER_S = 10e6


class PeerStore:
    """Connection to one peer, made when it is first needed. address: HOST:PORT. transfer: moves
    blocks if the peer has the same one. Otherwise, or when it fails, TCP does."""

    def __init__(
        self, address: str, max_bytes: int, transfer: DirectTransfer | None = None
    ) -> None:
        self._address = address
        self._host_port = parse_address("peer", address)
        self._secret = secret_for(self._host_port[0], "peer")
        self._sock: socket.socket | None = None
        self._until_s = 0.0  # deadline of the current exchange
        self._buffer = bytearray()
        self._direct = None if transfer is None else DirectReader(transfer)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for part in _parts(keys):
            with self._connection() as sock:
                sock.sendall(request(FIND, part))
                answers = receive(sock, len(part), until_s=self._until_s)
                found += [bool(each) for each in answers]
        return found

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield the values; each overwrites the previous one. A caller that stops early closes the
        connection, since the rest of the response would be read as the next one."""
        for part in _parts(keys):
            with self._connection() as sock:
                values = self._read_directly(sock, part)
                if values is not None:
                    yield from values
                    continue
                sock.sendall(request(GET, part))
                for _ in part:
                    (length,) = LENGTH.unpack(receive(sock, LENGTH.size, until_s=self._until_s))
                    yield None if length == NOTHING else self._value(sock, length)

    def _read_directly(
        self, sock: socket.socket, keys: Sequence[bytes]
    ) -> Sequence[Buffer | None] | None:
        """Return the values; None if they must be read over TCP."""
        if self._direct is None or not self._direct.is_connected:
            return None
        sock.sendall(request(LOCATIONS, keys))
        locations: list[tuple[int, int, bytes] | None] = []
        for _ in keys:
            address, length = LOCATION.unpack(receive(sock, LOCATION.size, until_s=self._until_s))
            if length == NOTHING:
                locations.append(None)
            else:
                header = receive(sock, HEADER_BYTES, until_s=self._until_s)
                locations.append((address, length, bytes(header)))
        return self._direct.read(locations)

    def _value(self, sock: socket.socket, length: int) -> memoryview:
        if length > MAX_VALUE_BYTES:
            raise StoreError(
                f"peer {self._address}: a value of {length} bytes was not written by quire."
            )
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        self._until_s += length / MIN_BYTES_PER_S
        return receive(sock, length, self._buffer, self._until_s)

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        return False

    def remove(self, keys: Sequence[bytes]) -> None:
        for part in _parts(keys):
            with self._connection() as sock:
                sock.sendall(request(REMOVE, part))
                receive(sock, 1, until_s=self._until_s)

    def close(self) -> None:
        self._disconnect()
        if self._direct is not None:
            self._direct.close()

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._direct is not None:
            self._direct.disconnect()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Yield the connection for one exchange, and close it after any error. Raises
        StoreError."""
        sock = self._sock
        try:
            self._until_s = time.monotonic() + CALL_S
            if sock is None:
                sock = self._sock = socket.create_connection(self._host_port, CONNECT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(CALL_S)
                introduce(sock, self._secret, self._until_s)
                self._get_to_know(sock)
            sock.settimeout(CALL_S)
            yield sock
        except BaseException as error:
            self._disconnect()
            if isinstance(error, OSError | StoreError):
                raise StoreError(f"peer {self._address}: {error}") from error
            raise

    def _get_to_know(self, sock: socket.socket) -> None:
        if self._direct is None or not self._direct.may_connect:
            return
        sock.sendall(request(DESCRIBE, []))
        (length,) = LENGTH.unpack(receive(sock, LENGTH.size, until_s=self._until_s))
        if length > MAX_DESCRIPTION_BYTES:
            raise StoreError(f"a description of {length} bytes was not written by quire.")
        self._direct.connect(bytes(receive(sock, length, until_s=self._until_s)))


def _parts(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the keys in parts that fit into a request."""
    for first in range(0, len(keys), MAX_KEYS):
        yield keys[first : first + MAX_KEYS]
