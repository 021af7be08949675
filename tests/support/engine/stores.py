"""Helpers of the tests of stores: blocks, host memory in Python, stores that fail."""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from quire.base.kv_orders import Answer, Fetch, Item, Keep, LookUp, Remove
from quire.engine.connectors.store import Buffer, block_key, seal

FINGERPRINT = hashlib.sha256(b"a cache").digest()
BLOCK_BYTES = {0: 1000, 1: 64}  # by group
PATIENCE_S = 20.0  # until a test that waits fails


def digest(i: int) -> bytes:
    return hashlib.sha256(i.to_bytes(8, "little")).digest()


def contents(i: int, group: int = 0) -> bytes:
    """What the block of digest i holds."""
    return hashlib.shake_128(b"%d %d" % (i, group)).digest(BLOCK_BYTES[group])


def key(i: int, group: int = 0) -> bytes:
    return block_key(FINGERPRINT, group, digest(i))


def sealed(i: int, group: int = 0) -> bytes:
    """What a store should hold for digest i."""
    data = contents(i, group)
    return seal(FINGERPRINT, group, digest(i), data) + data


def look_up(*numbers: int, request_id: str = "r") -> LookUp:
    return LookUp(0, request_id, tuple((0, digest(i)) for i in numbers))


def items(*numbers: int, group: int = 0) -> tuple[Item, ...]:
    """Digest i and host block i."""
    return tuple((group, digest(i), i) for i in numbers)


def fetch(*numbers: int, ticket: int = 1) -> Fetch:
    return Fetch(0, ticket, items(*numbers))


def keep(*numbers: int, ticket: int = 1) -> Keep:
    return Keep(0, ticket, items(*numbers))


def remove(*numbers: int, ticket: int = 1) -> Remove:
    return Remove(0, ticket, tuple((0, digest(i)) for i in numbers))


class Memory:
    """A `HostMemory`. gate: a write waits for it. writes: (group, block) in order."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], bytes] = {}
        self.writes: list[tuple[int, int]] = []
        self.gate = Gate()

    def block_bytes(self, group: int) -> int:
        return BLOCK_BYTES[group]

    def read(self, group: int, block: int) -> bytes:
        return self.blocks.get((group, block), bytes(BLOCK_BYTES[group]))

    def write(self, group: int, block: int, data: memoryview) -> None:
        self.gate.go_through()
        self.writes.append((group, block))
        self.blocks[group, block] = bytes(data)


class Gate:
    """Open, until it is shut: then who comes waits, and `came` is set."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self.came = threading.Event()

    def shut(self) -> None:
        self._is_open.clear()
        self.came.clear()

    def open(self) -> None:
        self._is_open.set()

    def go_through(self) -> None:
        self.came.set()
        assert self._is_open.wait(PATIENCE_S), "the gate stayed shut"


class DictStore:
    """Keeps values in a dict. gate: before each value that is read, written or looked up.

    calls: their names, in order. raises: what the next calls do instead.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.gate = Gate()
        self.raises: Callable[[], None] = lambda: None
        self.is_closed = threading.Event()

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        self.gate.go_through()
        self.raises()

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self._begin("find")
        return [key in self.values for key in keys]

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        for key in keys:
            self._begin("get")
            yield self.values.get(key)

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        self._begin("put")
        self.values[key] = b"".join(parts)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        self._begin("remove")
        for key in keys:
            self.values.pop(key, None)

    def close(self) -> None:
        self.is_closed.set()


class Answers:
    """What a worker answered, for a thread that waits for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.num_rings = 0

    def give(self, answer: Answer) -> None:
        self._queue.put(answer)

    def ring(self) -> None:
        self.num_rings += 1

    def take(self) -> Answer:
        return self._queue.get(timeout=PATIENCE_S)

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()
