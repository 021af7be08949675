"""Token ids of parts of long texts, so that only the new end of a known text is tokenized.

A chat client sends the whole conversation with each turn. The template renders earlier turns as
before, and `Cuts` cuts equal beginnings into equal parts.
"""

import threading
from array import array

MAX_CHARS = 1 << 22  # characters of all parts together


class KnownParts:
    """Token ids by part, least recently used first. Any thread may use it."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars, self._num_chars = max_chars, 0
        self._ids: dict[str, array[int]] = {}
        self._lock = threading.Lock()

    def __contains__(self, part: str) -> bool:
        return part in self._ids

    def find(self, part: str) -> list[int] | None:
        """Return the token ids of a part; None if they are not known."""
        with self._lock:
            found = self._ids.pop(part, None)
            if found is None:
                return None
            self._ids[part] = found
        return found.tolist()

    def add(self, part: str, token_ids: list[int]) -> None:
        """Store the token ids of a part. Drop the least recently used ones above the limit."""
        if len(part) > self._max_chars:
            return
        with self._lock:
            if self._ids.pop(part, None) is None:
                self._num_chars += len(part)
            self._ids[part] = array("I", token_ids)
            while self._num_chars > self._max_chars:
                oldest = next(iter(self._ids))
                del self._ids[oldest]
                self._num_chars -= len(oldest)
