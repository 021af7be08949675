"""Responses that are kept: by id, those of each key apart, in a bounded number of bytes.

A response holds its own input and output only, and the id of the one before it, so a conversation
takes what its items take, once. When room is needed, the key that holds most gives it, and of its
responses the one that was least recently used. Using a conversation uses the oldest of it last, so
that it does not lose its beginning first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

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
