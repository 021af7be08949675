"""Stored responses by owner and id, in a bounded number of bytes, and running responses.

A response holds its own input and output, and the id of its predecessor, so a conversation stores
each item once. To make room, the owner with the largest total loses its least recently used
response. Reading a conversation touches its oldest response last, so the beginning is not evicted
first.
"""

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.serve.errors import ApiError
from quire.serve.responses.background import RunningResponse

Json = dict[str, Any]
OVERHEAD_BYTES = 1024  # of Python objects, besides the texts
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Stored:
    """A stored response."""

    response: bytes  # JSON
    items: bytes  # JSON of its own input
    previous: str | None  # id of the response that it continues
    item_ids: tuple[str, ...]  # ids of its output's items
    events: tuple[bytes, ...] | None = None  # events of its stream, if they can be streamed again

    @classmethod
    def of(
        cls, response: Json, items: list[Json], events: Iterable[bytes] | None = None
    ) -> "Stored":
        """Return a stored response from its objects."""
        return cls(
            _encode(response),
            _encode(items),
            response["previous_response_id"],
            tuple(item["id"] for item in response["output"]),
            None if events is None else tuple(events),
        )

    @property
    def num_bytes(self) -> int:
        found = OVERHEAD_BYTES + len(self.response) + len(self.items)
        return found + sum(len(event) for event in self.events or ())


@dataclass
class _Shelf:
    """The responses of one owner, least recently used first."""

    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    by_item: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """Stored responses, which only their owner (a key's tenant) can find. max_bytes: maximum size
    of all responses together; 0 stores none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Store a response, unless it is larger than the whole store."""
        if stored.num_bytes > self._max_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.responses[response_id] = stored
        shelf.num_bytes += stored.num_bytes
        for item_id in stored.item_ids:
            shelf.by_item[item_id] = response_id
        while self.num_bytes > self._max_bytes:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self.remove(largest, next(iter(self._shelves[largest].responses)))

    def get(self, owner: str, response_id: str) -> Stored | None:
        """Return a response and mark it as the most recently used."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def remove(self, owner: str, response_id: str) -> bool:
        """Remove a response; return whether it existed."""
        shelf = self._shelves.get(owner)
        stored = shelf.responses.pop(response_id, None) if shelf is not None else None
        if shelf is None or stored is None:
            return False
        shelf.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            if shelf.by_item.get(item_id) == response_id:
                del shelf.by_item[item_id]
        if not shelf.responses:
            del self._shelves[owner]
        return True

    def conversation(self, owner: str, response_id: str) -> list[Stored] | str:
        """Return a response and its predecessors, oldest first; or the id of a missing one."""
        found: list[Stored] = []
        next_id: str | None = response_id
        while next_id is not None:
            stored = self.get(owner, next_id)
            if stored is None:
                return next_id
            found.append(stored)
            next_id = stored.previous
        return found[::-1]

    def with_item(self, owner: str, item_id: str) -> Stored | None:
        """Return the response that has an item in its output."""
        shelf = self._shelves.get(owner)
        response_id = None if shelf is None else shelf.by_item.get(item_id)
        return None if response_id is None else self.get(owner, response_id)


MAX_RUNNING = 256
RETRY_AFTER_S = 5
_DIGITS = 4


def new_id(kind: str, process: int) -> str:
    """Return an id such as resp_00003f2a...: kind, number of the process, random digits."""
    return f"{kind}_{process:0{_DIGITS}x}{uuid.uuid4().hex}"


def process_of(given: str) -> int | None:
    """Return the number of the process that made an id; None for an id of another form."""
    _, _, rest = given.partition("_")
    if len(rest) != _DIGITS + 32:
        return None
    try:
        return int(rest[:_DIGITS], 16)
    except ValueError:
        return None


class Responses:
    """The responses of one API process: stored ones, and those in the background."""

    def __init__(self, store_bytes: int, process: int = 0) -> None:
        self.store = ResponseStore(store_bytes)
        self.process = process
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def new_id(self, kind: str) -> str:
        """Return an id for a response or for an item of one."""
        return new_id(kind, self.process)

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return a response of an owner that runs in the background."""
        return self._running.get((owner, response_id))

    def check_room(self) -> None:
        """Raise ApiError if no more responses may run in the background."""
        if len(self._running) >= MAX_RUNNING:
            text = (
                f"{MAX_RUNNING} responses are running in the background already; try again later."
            )
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise ApiError(503, text, "server_error", code="engine_busy", headers=headers)

    def begin(self, owner: str, running: RunningResponse) -> Callable[[], None]:
        """Register a running response. Return the function that removes it."""
        self._running[owner, running.id] = running
        return lambda: self._forget(owner, running.id)

    def _forget(self, owner: str, response_id: str) -> None:
        self._running.pop((owner, response_id), None)
