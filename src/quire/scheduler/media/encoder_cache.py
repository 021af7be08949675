"""Encoder cache: numbered slots for encoder outputs, one per token, in entries by digest.

    referenced entry      a sequence is inside its item, or a step in flight writes or reads it
    unreferenced entry    stays for the next request with this digest; the least recently used one
                          is evicted first
    forgotten entry       cannot be found any more; its slots are freed with its last reference

Slots of an entry need not be adjacent, so there is no fragmentation.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from quire.base.requests.media_items import Int32


@dataclass(eq=False, slots=True)
class Entry:
    """Slots of one item's encoder outputs, int32 [num_tokens]. is_ready: the result of the step
    that encoded it is in. is_known: it can be found by its digest."""

    digest: bytes
    slots: Int32
    num_refs: int = 0
    is_ready: bool = False
    is_known: bool = True


class EncoderCache:
    """Pool of slots. entries: by digest, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_unreferenced = 0  # slots of evictable entries

    @property
    def num_used(self) -> int:
        """Number of slots that belong to entries."""
        return self.num_slots - len(self._free)

    @property
    def num_available(self) -> int:
        """Number of slots that `allocate` could assign now."""
        return len(self._free) + self._num_unreferenced

    def find(self, digest: bytes) -> Entry | None:
        """Return the entry with this digest, or None."""
        return self.entries.get(digest)

    def allocate(self, digest: bytes, num_tokens: int, spared: Container[bytes] = ()) -> Entry:
        """Return a new entry without references. Evict unreferenced entries for it, but not the
        digests in `spared`. Without these, at least num_tokens slots must be available."""
        assert digest not in self.entries, "the item has an entry"
        assert num_tokens <= self.num_available, "there are too few slots"
        while len(self._free) < num_tokens:
            unused = (e for e in self.entries.values() if not e.num_refs)
            self.forget(next(e for e in unused if e.digest not in spared))
        slots = np.array([self._free.pop() for _ in range(num_tokens)], np.int32)
        entry = self.entries[digest] = Entry(digest, slots)
        self._num_unreferenced += num_tokens
        return entry

    def take(self, entry: Entry) -> None:
        """Add a reference. The entry becomes the most recently used one."""
        if entry.num_refs == 0:
            assert entry.is_known, "its slots were given back"
            self._num_unreferenced -= len(entry.slots)
        entry.num_refs += 1
        if entry.is_known:
            self.entries.move_to_end(entry.digest)

    def release(self, entry: Entry) -> None:
        """Remove a reference."""
        assert entry.num_refs > 0, "it has no references"
        entry.num_refs -= 1
        if entry.num_refs:
            return
        if entry.is_known:
            self._num_unreferenced += len(entry.slots)
        else:
            self._free += entry.slots.tolist()

    def forget(self, entry: Entry) -> None:
        """Remove an entry from the index. Its slots are freed once it has no references."""
        if not entry.is_known:
            return
        entry.is_known = False
        del self.entries[entry.digest]
        if entry.num_refs == 0:
            self._num_unreferenced -= len(entry.slots)
            self._free += entry.slots.tolist()

    def check(self, referenced: Iterable[Entry]) -> None:
        """Assert that slots and references are consistent. referenced: one entry for each
        reference."""
        counts: dict[int, int] = {}
        alive = {id(entry): entry for entry in self.entries.values()}
        for entry in referenced:
            counts[id(entry)] = counts.get(id(entry), 0) + 1
            alive[id(entry)] = entry
        assert all(entry.num_refs == counts.get(i, 0) for i, entry in alive.items())
        held = [slot for entry in alive.values() for slot in entry.slots.tolist()]
        assert sorted(held + self._free) == list(range(self.num_slots)), "a slot is lost or shared"
        unreferenced = [len(e.slots) for e in self.entries.values() if not e.num_refs]
        assert self._num_unreferenced == sum(unreferenced), "the count is wrong"
