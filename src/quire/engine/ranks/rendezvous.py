"""Rendezvous of ranks on several machines: a key-value store in the core for their addresses.

torch's own network store listens at all addresses without a password. Ranks reach this store over
an authenticated connection (engine/ranks/connections.py):

    rank    StoreCall(op, keys, value)  ->      <-  StoreAnswer(values, number)
"""

import msgspec

from quire.engine.wire.wire import Codec

MAX_BYTES = 1 << 20  # maximum size of a message; an address has some hundred bytes
MAX_ENTRIES = 100_000


class StoreCall(msgspec.Struct, frozen=True):
    """Call of a rank to the store. op: set (one key to value), get (one key), add (number to one
    key), check (whether all keys exist), delete (one key), count (all keys)."""

    op: str
    keys: list[str] = []
    value: bytes = b""
    number: int = 0


class StoreAnswer(msgspec.Struct, frozen=True):
    """Answer of the store. value: value of a get; None if the key is missing. number: new sum of an
    add, 1 or 0 for check and delete, number of keys for count."""

    value: bytes | None = None
    number: int = 0


def core_store_codec() -> Codec[StoreCall]:
    """Return the core's codec for store calls."""
    return Codec(StoreCall, max_bytes=MAX_BYTES)


def rank_store_codec() -> Codec[StoreAnswer]:
    """Return a rank's codec for answers of the store."""
    return Codec(StoreAnswer, max_bytes=MAX_BYTES)


class RendezvousTable:
    """Key-value table that the core holds for all ranks."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def answer(self, call: StoreCall) -> StoreAnswer:
        """Execute a rank's call and return the answer. Raises ValueError for a malformed call."""
        entries = self._entries
        if call.op == "check":
            return StoreAnswer(number=int(all(key in entries for key in call.keys)))
        if call.op == "count":
            return StoreAnswer(number=len(entries))
        [key] = call.keys
        if call.op == "get":
            return StoreAnswer(entries.get(key))
        if call.op == "delete":
            return StoreAnswer(number=int(entries.pop(key, None) is not None))
        if key not in entries and len(entries) >= MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        if call.op == "set":
            entries[key] = call.value
            return StoreAnswer()
        if call.op == "add":
            number = int(entries.get(key, b"0")) + call.number
            entries[key] = str(number).encode()
            return StoreAnswer(number=number)
        raise ValueError(f"no such call: {call.op}")
