"""Stored responses by id, separated by key, in a bounded number of bytes; and those that run.

A response holds its own input and output, and the id of the one before it, so a conversation takes
the bytes of its items once. To make room, the key that holds most loses its least recently used
response. Using a conversation uses its oldest response last, so the beginning is not lost first.
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
OVERHEAD_BYTES = 1024  # what Python takes beside the texts
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Stored:
    """response, items: JSON; items are those of its own input. previous: the id of the response
    that it goes on from. item_ids: those of its output. events: what its stream sends, where it may
    be read again."""

    response: bytes
    items: bytes
    previous: str | None
    item_ids: tuple[str, ...]
    events: tuple[bytes, ...] | None = None

    @classmethod
    def of(
        cls, response: Json, items: list[Json], events: Iterable[bytes] | None = None
    ) -> "Stored":
        """Make it of objects."""
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
    """What one owner has stored, the least recently used first."""

    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    by_item: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """most_bytes: of all responses together; 0 keeps none. An owner is a key's tenant, and finds
    nothing of others."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._shelves: dict[str, _Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Keep a response, unless it is larger than the store."""
        if stored.num_bytes > self._most_bytes:
            return
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.responses[response_id] = stored
        shelf.num_bytes += stored.num_bytes
        for item_id in stored.item_ids:
            shelf.by_item[item_id] = response_id
        while self.num_bytes > self._most_bytes:
            largest = max(self._shelves, key=lambda name: self._shelves[name].num_bytes)
            self.remove(largest, next(iter(self._shelves[largest].responses)))

    def get(self, owner: str, response_id: str) -> Stored | None:
        """Return a response, which is the most recently used one then."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.responses:
            return None
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def remove(self, owner: str, response_id: str) -> bool:
        """Drop a response; return whether there was one."""
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
        """Return a response and those before it, the oldest first; or the id of the one that is
        not there."""
        found: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None:
            stored = self.get(owner, wanted)
            if stored is None:
                return wanted
            found.append(stored)
            wanted = stored.previous
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
    """Return an id such as resp_00003f2a...: kind, number of the process, and chance."""
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
    """The responses of one API process: stored ones, and those that run in the background."""

    def __init__(self, store_bytes: int, process: int = 0) -> None:
        self.store = ResponseStore(store_bytes)
        self.process = process
        self._running: dict[tuple[str, str], RunningResponse] = {}

    def new_id(self, kind: str) -> str:
        """Return an id for a response or for an item of one."""
        return new_id(kind, self.process)

    def running(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return a response of an owner that is being made in the background."""
        return self._running.get((owner, response_id))

    def check_room(self) -> None:
        """Raise ApiError if no more responses may be made in the background."""
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
