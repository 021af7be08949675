"""Roots of a request's block names, and the names of its blocks."""

import hashlib

import numpy as np
import pytest

from quire.kv.digest import RUN_BLOCKS, HasDigest, extend_digests
from quire.scheduler.core.names import Digester, Prefix
from quire.scheduler.policy.policies import make_block_hash
from tests.scheduler.test_step_results import scheduler_of, step
from tests.support.calls import counted_calls
from tests.support.scheduler.fake_device import make_request


def test_each_group_has_its_own_root_if_caching_is_off() -> None:
    request = make_request("r", [1, 2, 3])
    cached, uncached = (scheduler_of(on).memory.names for on in (True, False))
    plain = cached.root(request, 1, 0)
    assert cached.root(request, 3, 0) == cached.root(request, 3, 5) == plain
    roots = {uncached.root(request, 3, arrival) for arrival in range(3)}
    assert len(roots) == 3 and plain not in roots
    assert uncached.root(request, 1, 0) == uncached.root(request, 1, 5)


def test_a_prefix_among_rows_is_named_by_its_own_tokens() -> None:
    """Rows are named from the table of rows; a prefix has no row."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(8))), 0.0)
    step(scheduler, 5)
    sequence = scheduler.lifecycle.sequences["r"]
    tokens = np.arange(100, 108, dtype=np.int32)
    prefix = Prefix(0, b"root", tokens, [])
    expected: list[bytes] = []
    extend_digests(expected, b"root", tokens, 4, 1)
    own, sequence.digests[1:] = list(sequence.digests), []
    Digester()([sequence, prefix], 4, [2, 1])
    assert prefix.digests == expected and sequence.digests == own


def test_all_sequences_are_named_if_the_first_has_its_names() -> None:
    names, tokens = scheduler_of().memory.names, np.arange(8, dtype=np.int32)
    first, second = (Prefix(i, bytes(32), tokens) for i in range(2))
    names.extend([first], [2])
    names.extend([first, second], [2, 2])
    assert len(first.digests) == 2 and second.digests == first.digests


def test_a_known_conversation_is_not_hashed_again() -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> HasDigest:
        hashed.append(data)
        return hashlib.sha256(data)

    digester, tokens = Digester(counting), np.arange(400, dtype=np.int32)
    first, again, marked = (Prefix(i, b"root", tokens) for i in range(3))
    marked.marks = ((5, bytes(32)),)
    counts = []
    for prefix in (first, again, marked):
        digester([prefix], 4, [100])
        counts.append(len(hashed))
    assert counts == [100, 100 + 100 - RUN_BLOCKS, 200 + 100 - RUN_BLOCKS]
    assert again.digests == first.digests
    assert marked.digests[0] == first.digests[0]
    assert set(marked.digests[1:]).isdisjoint(first.digests), "marks are part of the names"


@pytest.mark.parametrize("num", [1, 3])
def test_blocks_are_named_with_the_chosen_hash(num: int) -> None:
    """Alone, and together with other rows."""
    block_hash = make_block_hash("blake2b")
    scheduler = scheduler_of()
    scheduler.memory.names.digester = Digester(block_hash)
    for i in range(num):
        scheduler.add(make_request(f"{i}", list(range(10 * i, 10 * i + 7)), max_tokens=4), 0.0)
    step(scheduler, 5)
    step(scheduler, 5)  # fills the second block of each
    for sequence in scheduler.lifecycle.sequences.values():
        expected: list[bytes] = []
        extend_digests(expected, sequence.root, sequence.known_tokens, 4, 2, block_hash)
        assert sequence.digests == expected
        assert all(scheduler.memory.kv.is_cached(0, name) for name in expected)


def test_decoding_rows_are_named_only_when_a_block_is_full() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(7)), max_tokens=16), 0.0)
    step(scheduler, 5)
    with counted_calls() as calls:
        for _ in range(9):  # tokens 8 to 16, in blocks of 4
            step(scheduler, 5)
    assert sum(num for (_, name), num in calls.items() if name == "index_blocks") == 3


def test_new_names_are_recorded_once_with_their_sequence() -> None:
    """NewNames: the sequence, its digests, how many it had, and how many it has now."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(8))), 0.0)
    sequence, naming = scheduler.lifecycle.sequences["r"], scheduler.memory.names
    naming.new = new = []
    sequence.digests.clear()
    naming.extend([sequence], [1])
    naming.extend([sequence], [2])
    naming.extend([sequence], [2])
    digests = sequence.digests
    assert new == [(0, digests, 0, 1), (0, digests, 1, 2)]
    assert len(digests) == 2
