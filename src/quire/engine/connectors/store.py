"""What a store of KV blocks is, and the envelope that each block's bytes travel in.

    magic | version u32 | group u32 | bytes of data u64 | fingerprint | digest | CRC-32 u32 | data

A store only moves values that it need not understand: keys and envelopes are made and checked here,
so a store of any package can lose, cut off, mix up or damage what it keeps, and the worst that
comes of it is a miss.

The checksum covers header and data. It finds every error in up to 32 bits that follow each other
and all but one in 2**32 of others; zlib computes it at 6.7 GB/s (one core of an EPYC of 2024, 57 KB
and 1.75 MB alike), while the interpreter is free for other threads.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from quire.base.errors import QuireError

MAGIC = b"QUIREKVB"
VERSION = 1  # raised whenever the envelope, or the layout of a block in it, changes
BODY = struct.Struct("<8sIIQ32s32s")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = BODY.size + CHECKSUM.size
DIGEST_BYTES = 32
KEY = struct.Struct(">32sI32s")  # fingerprint, group, digest

Buffer = bytes | bytearray | memoryview


class StoreError(QuireError):
    """A store cannot do what it was asked. Say what was wrong, and what to do."""


class BlockStore(Protocol):
    """Keeps values under keys, somewhere else. One thread calls it, never two at once.

    A class that another package brings is called with the store's address, a string, and the most
    bytes that it may keep; a store that others limit need not look at the latter. Making it should
    not connect to anything: what raises then keeps the engine from starting.

    All methods may raise OSError or StoreError: that is a miss, and storing goes on. They should
    end within a second: a request that waits is told of a miss after a while, and while a call
    hangs all else is a miss, too.
    """

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell which of these keys have a value, in their order."""
        ...

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield the values, one for each key in their order; None is a miss.

        A value need only stay as it is until the next one is asked for. The caller may stop early.
        The caller asks for some megabytes at once, so a network needs one round trip.
        """
        ...

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Keep the parts, one after the other, as the value, also if there is one already. False
        if they are not kept, for example because there is no room.

        A read meanwhile must get the old value or the new one. The parts change afterwards.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Have no values under these keys any more; a key may have had none. They may be wrong,
        though whole: this is called when a request has failed whose tokens they are of."""
        ...

    def close(self) -> None:
        """Close; the last call."""
        ...


def block_key(fingerprint: bytes, group: int, digest: bytes) -> bytes:
    """Return the key of a block, 68 bytes: the fingerprint, the group (big endian), the digest."""
    assert len(fingerprint) == len(digest) == DIGEST_BYTES, "digests have 32 bytes"
    return KEY.pack(fingerprint, group, digest)


def split_key(key: bytes) -> tuple[bytes, int, bytes]:
    """Split a key into fingerprint, cache group and digest."""
    fingerprint, group, digest = KEY.unpack(key)
    return fingerprint, group, digest


def seal(fingerprint: bytes, group: int, digest: bytes, data: Buffer) -> bytes:
    """Make the header that goes before a block's bytes."""
    body = BODY.pack(MAGIC, VERSION, group, memoryview(data).nbytes, fingerprint, digest)
    return body + CHECKSUM.pack(zlib.crc32(data, zlib.crc32(body)))


def unseal(
    value: Buffer, fingerprint: bytes, group: int, digest: bytes, num_bytes: int
) -> tuple[memoryview | None, str]:
    """Return the bytes of this block (a view of the value), or None and why the value is
    refused."""
    view = memoryview(value).cast("B")
    if len(view) < HEADER_BYTES:
        return None, "it ends within its header"
    body, data = view[: BODY.size], view[HEADER_BYTES:]
    magic, version, *name, length = _fields(body)
    if magic != MAGIC:
        return None, "it is not a quire block"
    if version != VERSION:
        return None, f"its format is {version}, and this quire reads {VERSION}"
    if length != len(data):
        return None, f"it has {len(data)} bytes of data, and should have {length}"
    if zlib.crc32(data, zlib.crc32(body)) != CHECKSUM.unpack_from(view, BODY.size)[0]:
        return None, "its checksum differs"
    if name != [fingerprint, group, digest]:
        return None, "the block belongs to another cache or to other tokens"
    if length != num_bytes:
        return None, f"it has {length} bytes, and blocks of this group have {num_bytes}"
    return data, ""


def _fields(body: memoryview) -> tuple[bytes, int, bytes, int, bytes, int]:
    """Read magic, version, fingerprint, cache group, digest, bytes of data."""
    magic, version, group, length, fingerprint, digest = BODY.unpack(body)
    return magic, version, fingerprint, group, digest, length
