"""Wire format between clients and a core: typed messages as msgpack, each after its length.

    | length, 4 bytes, little endian | msgpack of one struct of base/messages.py |

Each client has one Unix stream socket; the end of the stream shows at once that the other side has
died. Nothing is pickled. Messages of other types are rejected.
"""

import errno
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from quire.base.errors import EngineError
from quire.base.messages import FromCore, ToCore
from quire.base.plan import Float64, Int16, Int32

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30
READ_BYTES = 1 << 18
# Errors of `accept` after which an immediate retry would fail too.
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

T = TypeVar("T")


class Codec(Generic[T]):
    """Codec that encodes any message, and decodes messages of the type `incoming`.

    plain, typed: msgspec's `enc_hook` and `dec_hook` for values without a form in msgpack; without
    them such values are rejected. max_bytes: maximum size of a message.
    """

    def __init__(
        self,
        incoming: Any,
        plain: Callable[[Any], Any] | None = None,
        typed: Callable[[Any, Any], Any] | None = None,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=plain)
        self._decoder = msgspec.msgpack.Decoder(incoming, dec_hook=typed)
        self._max_bytes = max_bytes

    def encode(self, message: msgspec.Struct) -> bytes:
        """Return the length and the encoded message. Raises EngineError if it is too long."""
        body = self._encoder.encode(message)
        if len(body) > self._max_bytes:
            raise EngineError(f"a message of {len(body)} bytes is longer than the wire allows.")
        return LENGTH.pack(len(body)) + body

    def decode(self, body: bytes | memoryview) -> T:
        """Decode a body without its length. Raises EngineError if it is not such a message."""
        try:
            message: T = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise EngineError(f"a message that is not quire's: {error}") from error
        return message

    def frames(self) -> "Frames":
        """Return a new splitter for a stream of this codec's messages."""
        return Frames(self._max_bytes)


def core_codec() -> Codec[ToCore]:
    """Return the codec of a core, which receives `ToCore`."""
    return Codec(ToCore, _array_to_bytes, _bytes_to_array)


def client_codec() -> Codec[FromCore]:
    """Return the codec of a client, which receives `FromCore`."""
    return Codec(FromCore, _array_to_bytes, _bytes_to_array)


def body_length(head: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length in a head of four bytes. Raises EngineError if it exceeds most_bytes."""
    length: int = LENGTH.unpack(head)[0]
    if length > max_bytes:
        raise EngineError(f"a message of {length} bytes is longer than the wire allows.")
    return length


class Frames:
    """Splitter of a byte stream into message bodies. Reads may end anywhere within a message."""

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data, and yield the bodies that it completes."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            start = at + LENGTH.size
            end = start + body_length(bytes(self._buffer[at:start]), self._max_bytes)
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start:end])
            at = end
        del self._buffer[:at]


def _array_to_bytes(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.integer):
        return int(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _bytes_to_array(kind: Any, value: Any) -> Any:
    dtypes: dict[Any, Any] = {Int16: np.int16, Int32: np.int32, Float64: np.float64}
    return np.frombuffer(value, dtypes.get(kind, np.float32))
