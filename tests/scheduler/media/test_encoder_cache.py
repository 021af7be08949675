"""The pool of slots: which entries are evicted or spared, and when slots are free again."""

import pytest

from quire.scheduler.media.encoder_cache import EncoderCache, Entry


def filled(*sizes: int) -> tuple[EncoderCache, list[Entry]]:
    cache = EncoderCache(10)
    return cache, [cache.allocate(b"%d" % i, size) for i, size in enumerate(sizes)]


def test_the_least_recently_used_entries_are_evicted_as_far_as_needed() -> None:
    cache, entries = filled(3, 3, 3)
    cache.take(entries[0])
    cache.release(entries[0])  # used last
    new = cache.allocate(b"new", 4)
    assert list(cache.entries) == [b"2", b"0", b"new"]
    assert not set(new.slots.tolist()) & {*entries[0].slots.tolist(), *entries[2].slots.tolist()}
    cache.check([])


def test_references_and_spared_digests_keep_entries() -> None:
    cache, entries = filled(3, 3, 3)
    cache.take(entries[0])
    assert (cache.num_available, cache.num_used) == (7, 9)
    cache.allocate(b"new", 4, spared={b"1"})
    assert list(cache.entries) == [b"1", b"0", b"new"]
    cache.check([entries[0]])
    with pytest.raises(AssertionError, match="too few slots"):
        cache.allocate(b"more", 8)


def test_slots_of_a_forgotten_entry_are_freed_after_its_last_release() -> None:
    cache, [entry, other] = filled(6, 4)
    cache.take(entry)
    cache.take(entry)
    cache.forget(entry)
    assert cache.find(b"0") is None and cache.num_available == 4
    again = cache.allocate(b"0", 4)  # evicts the other
    assert cache.find(b"1") is None and again is not entry
    for num_left in (1, 0):
        cache.release(entry)
        cache.check([entry] * num_left)
    assert cache.num_available == 10
    assert not other.is_known
