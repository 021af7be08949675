"""Interface of a store of KV blocks, and the envelope around each block's bytes.

    magic | version u32 | group u32 | bytes of data u64 | fingerprint | digest | CRC-32 u32 | data

A store moves values without understanding them: keys and envelopes are made and checked here. So a
store of any package may lose, cut off, mix up or damage values, and the worst result is a miss.

The checksum covers header and data. It finds every error within 32 consecutive bits, and all but
one in 2**32 of the others. zlib computes it at 6.7 GB/s (one core of an EPYC of 2024, for 57 KB and
for 1.75 MB). Meanwhile the interpreter is free for other threads.
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
    """Error of a store that cannot do a call. Say what was wrong, and what to do."""


class BlockStore(Protocol):
    """Storage of values under keys. Only one thread calls it at a time.

    A class of another package is called with the store's address, a string, and the maximum bytes
    to store. A store with a limit of its own may ignore the latter. Creating it should not connect
    to anything: an error then prevents the engine from starting.

    All methods may raise OSError or StoreError: that is a miss, and storing continues. They should
    return within a second. A waiting request gets a miss after a while, and while a call hangs, all
    other requests get misses, too."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which of these keys have a value, in their order."""
        ...

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield the values, one for each key in their order; None is a miss.

        A value may change after the next one is taken. The caller may stop early. It requests some
        megabytes at once, so a network needs one round trip."""
        ...

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        """Store the concatenated parts as the value, also if there is one already. Return False if
        they are not stored, for example because there is no room.

        A read meanwhile must get the old value or the new one. The caller changes the parts
        afterwards."""
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the values under these keys; a key may have none. The values may be wrong, though
        intact: this is called for the tokens of a request that has failed."""
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
    """Return the header of a block's bytes."""
    body = BODY.pack(MAGIC, VERSION, group, memoryview(data).nbytes, fingerprint, digest)
    return body + CHECKSUM.pack(zlib.crc32(data, zlib.crc32(body)))


def unseal(
    value: Buffer, fingerprint: bytes, group: int, digest: bytes, num_bytes: int
) -> tuple[memoryview | None, str]:
    """Return the bytes of this block (a view of the value), or None and the reason for rejecting
    it."""
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
    """Return magic, version, fingerprint, cache group, digest, bytes of data."""
    magic, version, group, length, fingerprint, digest = BODY.unpack(body)
    return magic, version, fingerprint, group, digest, length
