"""One item of the curriculum: a conversation whose last message is the wanted answer."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
HELD_OUT_SHARE = 20


@dataclass
class Item:
    """A conversation, its tools, and the key of its split into training or held-out items.

    messages: end with the assistant's answer.
    key: hashed for the split.
    check: replaces exact comparison of the answer, if given.
    part: the sub-kind in the accuracy table.
    """

    kind: str
    messages: list[Message]
    key: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    check: Callable[[str], bool] | None = None
    part: str = ""

    @property
    def answer(self) -> Message:
        """The wanted assistant message."""
        return self.messages[-1]


def held_out(key: str) -> bool:
    """Return whether the item with this key belongs to the held-out twentieth."""
    return zlib.crc32(key.encode("utf-8")) % HELD_OUT_SHARE == 0


def user(content: str) -> Message:
    """Return a user message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant message."""
    return {"role": "assistant", "content": content}


def draw(make: Callable[[random.Random], Item], rng: random.Random, test: bool) -> Item:
    """Draw items from `make` until one is on the wanted side of the split."""
    while True:
        item = make(rng)
        if held_out(item.key) == test:
            return item
