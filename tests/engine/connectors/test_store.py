"""The envelope of stored blocks: only unchanged blocks with the right name can be opened."""

import msgspec
import numpy as np
import pytest

from quire.base.kv_orders import (
    Answer,
    Fetch,
    Fetched,
    Keep,
    Kept,
    LookedUp,
    LookUp,
    Order,
    Remove,
    Removed,
)
from quire.engine.connectors.store import (
    HEADER_BYTES,
    KEY,
    block_key,
    seal,
    split_key,
    unseal,
)
from quire.scheduler.snapshot import decode, encode
from tests.support.engine.stores import BLOCK_BYTES, FINGERPRINT, contents, digest, sealed

SIZE = BLOCK_BYTES[0]


def opened(value: bytes | bytearray | memoryview) -> tuple[bytes | None, str]:
    data, reason = unseal(value, FINGERPRINT, 0, digest(1), SIZE)
    return (None if data is None else bytes(data)), reason


def test_sealed_block_is_opened_from_any_kind_of_bytes() -> None:
    value = sealed(1)
    assert len(value) == HEADER_BYTES + SIZE
    for kind in (bytes, bytearray, memoryview):
        assert opened(kind(value)) == (contents(1), "")
    array = np.frombuffer(contents(1), np.int16).reshape(-1, 4)
    assert seal(FINGERPRINT, 0, digest(1), memoryview(array)) == value[:HEADER_BYTES]


def test_every_flipped_bit_and_wrong_length_is_detected() -> None:
    value = bytearray(sealed(1))
    for bit in range(8 * HEADER_BYTES):
        value[bit // 8] ^= 1 << bit % 8
        data, reason = opened(value)
        assert data is None and reason, bit
        value[bit // 8] ^= 1 << bit % 8
    for i in range(HEADER_BYTES, len(value)):
        value[i] ^= 0x10
        assert opened(value) == (None, "its checksum differs")
        value[i] ^= 0x10
    for length in range(len(value)):
        assert opened(value[:length])[0] is None
    assert "1001 bytes of data" in opened(value + b"\0")[1]
    assert opened(value)[0] == contents(1)


def test_bursts_of_errors_are_detected() -> None:
    """As a disk or a torn write causes them: runs of zeros or of random bytes."""
    random = np.random.default_rng(1)
    value = np.frombuffer(sealed(1), np.uint8)
    for _ in range(2000):
        broken = value.copy()
        start, length = random.integers(len(value)), random.integers(1, 600)
        part = broken[start : start + length]
        part[:] = 0 if random.integers(2) else random.integers(0, 256, len(part))
        if not np.array_equal(broken, value):
            assert opened(broken.tobytes())[0] is None


def test_intact_blocks_with_another_identity_are_refused() -> None:
    foreign = seal(bytes(32), 0, digest(1), contents(1)) + contents(1)
    other_group = seal(FINGERPRINT, 1, digest(1), contents(1)) + contents(1)
    for value in (foreign, other_group, sealed(2)):
        assert opened(value) == (None, "the block belongs to another cache or to other tokens")
    shorter = seal(FINGERPRINT, 0, digest(1), b"short") + b"short"
    assert opened(shorter) == (None, f"it has 5 bytes, and blocks of this group have {SIZE}")


def test_refused_values_have_a_reason() -> None:
    value = sealed(1)
    assert opened(b"")[1] == "it ends within its header"
    assert opened(b"x" * 2000)[1] == "it is not a quire block"
    newer = value[:8] + (99).to_bytes(4, "little") + value[12:]
    assert opened(newer)[1] == "its format is 99, and this quire reads 1"


def test_block_key_can_be_split_into_its_parts() -> None:
    key = block_key(FINGERPRINT, 3, digest(5))
    assert len(key) == KEY.size == 68
    assert split_key(key) == (FINGERPRINT, 3, digest(5))
    with pytest.raises(AssertionError):
        block_key(b"short", 0, digest(1))


def test_orders_and_answers_survive_wire_and_recording() -> None:
    messages = [
        LookUp(1, "r", ((0, digest(1)), (1, digest(2)))),
        Fetch(1, 7, ((0, digest(1), 3),)),
        Keep(0, 8, ()),
        LookedUp(1, "r", [True, False]),
        Fetched(1, 7, [True], 1000, 0.5),
        Kept(0, 8, [], 0, 0.0),
        Remove(0, 9, ((1, digest(2)),)),
        Removed(0, 9, [True]),
    ]
    any_of = msgspec.msgpack.Decoder(Order | Answer)
    for message in messages:
        assert any_of.decode(msgspec.msgpack.encode(message)) == message
        assert decode(msgspec.msgpack.decode(msgspec.msgpack.encode(encode(message)))) == message
