"""Digests: what must differ differs, and the values are fixed for ever."""

import numpy as np

from quire.kv.digest import cache_fingerprint, extend_by_one, extend_digests, root_digest


def chain(tokens: list[int], root: bytes, size: int = 4) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, root, np.asarray(tokens, np.int32), size, len(tokens) // size)
    return digests


def test_a_digest_depends_on_all_tokens_before_it() -> None:
    root = root_digest(b"model")
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8], root), chain([9, 2, 3, 4, 5, 6, 7, 8], root)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one == chain([1, 2, 3, 4, 5, 6, 7, 8, 9], root)


def test_equal_blocks_at_different_places_differ() -> None:
    first, second = chain([1, 2, 3, 4] * 2, root_digest(b""))
    assert first != second


def test_extending_in_steps_is_the_same_as_at_once() -> None:
    root, tokens = root_digest(b"x"), np.arange(12, dtype=np.int32)
    digests: list[bytes] = []
    for num_blocks in (1, 1, 3):
        extend_digests(digests, root, tokens, 4, num_blocks)
    assert digests == chain(list(range(12)), root)


def test_roots_do_not_confuse_their_parts() -> None:
    roots = {
        root_digest(b"m"),
        root_digest(b"m", "a"),
        root_digest(b"m", "", "a"),
        root_digest(b"m", "", "", ["a"]),
        root_digest(b"m", "ab"),
        root_digest(b"m", "a", "b"),
        root_digest(b"n"),
    }
    assert len(roots) == 7
    assert cache_fingerprint("ab", "c") != cache_fingerprint("a", "bc")


def test_digests_are_the_same_in_every_process() -> None:
    """A value written down once: a change would orphan every cache on disk."""
    digest = chain([1, 2, 3, 4], root_digest(cache_fingerprint("model", "float32")))[0]
    assert digest.hex() == PINNED


PINNED = "52aa031bcbdca0391b847ab03beb3521eb3e0e086ae472160edf94a786e6de23"


def test_many_are_extended_as_each_is_alone() -> None:
    tokens = np.arange(3 * 8, dtype=np.int32).reshape(3, 8)
    roots = [root_digest(name) for name in (b"a", b"b", b"c")]
    alone = [chain(row.tolist(), root) for row, root in zip(tokens, roots, strict=True)]
    together: list[list[bytes]] = [[], [], []]
    for columns in (slice(0, 4), slice(4, 8)):
        extend_by_one(together, roots, tokens[:, columns])
    assert together == alone
