"""Digests: different contents have different digests, and the values never change."""

import hashlib
from collections.abc import Callable
from sys import getsizeof
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.kv.digest import (
    DIGEST_BYTES,
    RUN_BLOCKS,
    BlockHash,
    HasDigest,
    KnownRuns,
    Mark,
    cache_fingerprint,
    extend_by_one,
    extend_digests,
    root_digest,
)
from quire.scheduler.policy import policies
from quire.scheduler.policy.policies import BLOCK_HASHES, make_block_hash


def chain(
    tokens: list[int], root: bytes, size: int = 4, block_hash: BlockHash = hashlib.sha256
) -> list[bytes]:
    digests: list[bytes] = []
    num = len(tokens) // size
    extend_digests(digests, root, np.asarray(tokens, np.int32), size, num, block_hash)
    return digests


def test_a_digest_depends_on_all_tokens_before_it() -> None:
    root = root_digest(b"model")
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8], root), chain([9, 2, 3, 4, 5, 6, 7, 8], root)
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert one == chain([1, 2, 3, 4, 5, 6, 7, 8, 9], root)


def test_equal_blocks_at_different_positions_have_different_digests() -> None:
    first, second = chain([1, 2, 3, 4] * 2, root_digest(b""))
    assert first != second


def test_extending_in_steps_is_the_same_as_at_once() -> None:
    root, tokens = root_digest(b"x"), np.arange(12, dtype=np.int32)
    digests: list[bytes] = []
    for num_blocks in (1, 1, 3):
        extend_digests(digests, root, tokens, 4, num_blocks)
    assert digests == chain(list(range(12)), root)


def test_roots_differ_if_the_same_text_is_split_differently() -> None:
    roots = {
        root_digest(b"m"),
        root_digest(b"m", "a"),
        root_digest(b"m", "", "a"),
        root_digest(b"m", "ab"),
        root_digest(b"m", "a", "b"),
        root_digest(b"n"),
    }
    assert len(roots) == 6
    assert cache_fingerprint("ab", "c") != cache_fingerprint("a", "bc")


def test_a_mark_changes_its_block_and_those_after_it() -> None:
    root, tokens, one, other = (
        root_digest(b"m"),
        np.arange(12, dtype=np.int32),
        b"1" * 32,
        b"2" * 32,
    )

    def marked(*marks: Mark) -> list[bytes]:
        digests: list[bytes] = []
        extend_digests(digests, root, tokens, 4, 3, marks=marks)
        return digests

    plain = marked()
    found = [marked((5, one)), marked((5, other)), marked((6, one)), marked((5, one), (6, one))]
    assert all(each[0] == plain[0] for each in found)
    for block in (1, 2):
        assert len({plain[block], *(each[block] for each in found)}) == 5
    assert marked((12, one)) == plain, "it starts after the last block"
    data = plain[0] + tokens[4:8].tobytes() + (1).to_bytes(4, "little") + one
    assert found[0][1] == hashlib.sha256(data).digest()
    in_steps = plain[:1]
    for num in (2, 3):
        extend_digests(in_steps, root, tokens, 4, num, marks=[(5, one)])
    assert in_steps == found[0]


@pytest.mark.parametrize("name", BLOCK_HASHES)
def test_digests_are_the_same_in_every_process(name: str) -> None:
    """Values written down once: a change would orphan every cache on disk."""
    root = root_digest(cache_fingerprint("model", "float32"))
    found = chain([1, 2, 3, 4, 5, 6, 7, 8], root, block_hash=make_block_hash(name))
    assert [each.hex() for each in found] == PINNED[name]


SHA256 = [
    "52aa031bcbdca0391b847ab03beb3521eb3e0e086ae472160edf94a786e6de23",
    "237788ae783820c9d1fca1701405591e3570015df60c41ba68d5921249ea4d7c",
]
PINNED = {
    "sha256": SHA256,
    "sha256_cbor": SHA256,
    "blake2b": [
        "9ce61f766092fe873494952b20a2ee6b353e215e54163ff6540d83c14b3875e2",
        "a1d2c487b5b06a10f0ff0ff79b9d5fadec75d5f09d5ccb7e39cb36d612c615e8",
    ],
}


class Padded:
    """A short hash padded with zeros, with which all blocks would have one name in KV events."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def digest(self) -> bytes:
        return hashlib.md5(self._data).digest().ljust(32, b"\0")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (hashlib.md5, "must return 32 bytes.* got"),
        (lambda data: hashlib.sha256(b""), "that differ for other data"),
        (Padded, "that differ for other data"),
        (lambda data: hashlib.shake_128(data), "cannot be created: TypeError"),
    ],
)
def test_a_plug_in_hash_is_checked_when_it_is_loaded(
    made: Callable[[bytes], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "load_plugin", lambda *_: made)
    with pytest.raises(ConfigError, match=f"block hash 'odd' .*{reason}"):
        make_block_hash("odd")


@pytest.mark.parametrize("name", ["sha256", "blake2b"])
def test_extend_by_one_gives_the_digests_of_the_chain(name: str) -> None:
    block_hash, root = make_block_hash(name), root_digest(b"a")
    tokens = np.arange(8, dtype=np.int32)
    digests: list[bytes] = []
    for first in (0, 4):
        extend_by_one(digests, root, tokens[first : first + 4], block_hash)
    assert digests == chain(tokens.tolist(), root, block_hash=block_hash)


class CountingHash:
    """SHA-256 that counts its calls."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, data: bytes) -> HasDigest:
        self.num += 1
        return hashlib.sha256(data)


SIZE, RUN = 4, RUN_BLOCKS * 4  # tokens of a block, and of a run


def from_runs(runs: KnownRuns, tokens: list[int], root: bytes, *steps: int) -> list[bytes]:
    """Return the digests of a prompt that is named in these steps, then as a whole."""
    digests: list[bytes] = []
    for num in (*steps, len(tokens) // SIZE):
        runs.extend(digests, root, np.asarray(tokens, np.int32), SIZE, num)
        assert len(digests) == num
    return digests


def test_known_runs_are_not_hashed_again() -> None:
    count, root = CountingHash(), root_digest(b"m")
    runs, prompt = KnownRuns(count), list(range(3 * RUN + 2 * SIZE))
    assert from_runs(runs, prompt, root) == chain(prompt, root)
    assert count.num == 3 * RUN_BLOCKS + 2
    longer = prompt + [7] * 5 * SIZE
    assert from_runs(runs, longer, root) == chain(longer, root)
    assert count.num == 3 * RUN_BLOCKS + 2 + 7, "only what follows the known runs is hashed"


@pytest.mark.parametrize(
    "steps", [(), (1, 3), (RUN_BLOCKS,), (RUN_BLOCKS - 1, RUN_BLOCKS + 1), (70, 140)]
)
def test_digests_of_runs_are_those_of_blocks(steps: tuple[int, ...]) -> None:
    rng, runs, root = np.random.default_rng(3), KnownRuns(), root_digest(b"m", "salt")
    prompt = rng.integers(0, 1000, 3 * RUN + 3).tolist()
    for changed in (0, 5, RUN - 1, RUN, 2 * RUN + 1, 3 * RUN + 1):
        for _ in range(2):
            assert from_runs(runs, prompt, root, *steps) == chain(prompt, root)
        prompt[changed] += 1
    other = root_digest(b"m", "other salt")
    assert from_runs(runs, prompt, other, *steps) == chain(prompt, other)


def bytes_of_run(block_size: int) -> int:
    return RUN_BLOCKS * (4 * block_size + DIGEST_BYTES)


@pytest.mark.parametrize("size", [1, 16])
def test_the_memory_of_runs_is_bounded_for_blocks_of_any_size(size: int) -> None:
    """The bound holds for the objects as Python counts them, within 10 percent."""
    bound = 10 * bytes_of_run(size)
    runs, tokens = KnownRuns(max_bytes=bound), np.arange(40 * RUN_BLOCKS * size, dtype=np.int32)
    for _ in range(2):
        runs.extend([], b"root", tokens, size, len(tokens) // size)
        assert len(runs) == 10
    held = sum(
        getsizeof(tokens) + getsizeof(digests) + sum(map(getsizeof, digests))
        for (_, tokens), digests in runs._runs.items()
    )
    assert bound / 2 < held < 1.1 * bound


def test_least_recently_used_runs_are_dropped() -> None:
    count, root = CountingHash(), root_digest(b"m")
    runs = KnownRuns(count, max_bytes=2 * bytes_of_run(SIZE))
    one, two, three = ([first, *range(RUN - 1)] for first in (1, 2, 3))
    for prompt in (one, two, one, three):
        from_runs(runs, prompt, root)
    before = count.num
    from_runs(runs, one, root)
    assert count.num == before, "it was used after the second one"
    from_runs(runs, two, root)
    assert count.num == before + RUN_BLOCKS
    assert len(runs) == 2
