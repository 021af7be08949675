"""Where ranks of several machines tell each other how they reach each other: a store in the core.

torch's own store for networks listens at all addresses and asks for no password. This one is asked
over a connection that has proved itself (engine/ranks/dial_in.py):

    rank    StoreCall(op, keys, value)  ->      <-  StoreAnswer(values, number)
"""

import msgspec

from quire.engine.wire.wire import Codec

MOST_BYTES = 1 << 20  # of a message; addresses are some hundred
MOST_ENTRIES = 100_000


class StoreCall(msgspec.Struct, frozen=True):
    """op: set (one key to a value), get (one key), add (a number to one key), check (all keys),
    delete (one key), count."""

    op: str
    keys: list[str] = []
    value: bytes = b""
    number: int = 0


class StoreAnswer(msgspec.Struct, frozen=True):
    """value: what get has found; None: nothing. number: the sum; 1 for yes; how many there are."""

    value: bytes | None = None
    number: int = 0


def table_codec() -> Codec[StoreCall]:
    """Return the codec of the core."""
    return Codec(StoreCall, most_bytes=MOST_BYTES)


def asker_codec() -> Codec[StoreAnswer]:
    """Return the codec of a rank."""
    return Codec(StoreAnswer, most_bytes=MOST_BYTES)


class MeetingTable:
    """What the core keeps for all ranks."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def answer(self, call: StoreCall) -> StoreAnswer:
        """Do what a rank asks for. Raises ValueError for what makes no sense."""
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
        if key not in entries and len(entries) >= MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} entries")
        if call.op == "set":
            entries[key] = call.value
            return StoreAnswer()
        if call.op == "add":
            number = int(entries.get(key, b"0")) + call.number
            entries[key] = str(number).encode()
            return StoreAnswer(number=number)
        raise ValueError(f"no such call: {call.op}")
