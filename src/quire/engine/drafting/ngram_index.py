"""Index of the runs of tokens in a text: hash chains, as in compressors that look for repeats.

A *place* is the index of the token that follows a run. Runs of 6 and of 2 tokens are indexed. Each
place links to the previous place whose run has the same hash, and a table holds the newest place of
each hash. A linked place may follow another run, or be overwritten by now, so tokens are compared
before a place is used. A token takes 12 bytes, and no text is ever scanned.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

LONG, SHORT = 6, 2  # tokens of the indexed runs
MAX_PLACES = 16  # maximum places of a chain that are compared, the newest first
NOTHING = -1  # stands for a missing token or place

HASH_BITS = 32
MASK = (1 << HASH_BITS) - 1
BASE = 0x9E3779B1
BASE_2, BASE_4 = BASE**2 & MASK, BASE**4 & MASK
SPREAD = 0x85EBCA6B

Ints: TypeAlias = "array[int]"
Hashes: TypeAlias = npt.NDArray[np.uint64]
Match = tuple[int, list[int]]  # number of equal tokens, and the places after them


class Keys(NamedTuple):
    """Hashes of the last LONG and SHORT tokens. Shorter texts than LONG have none."""

    long: int
    short: int


class RunKeys(NamedTuple):
    """Hashes of the last LONG and SHORT tokens before each token of a run."""

    long: list[int]
    short: list[int]


def keys_of(tokens: Ints) -> Keys | None:
    """Return the hashes of the runs at the end of these tokens; None for fewer than LONG."""
    if len(tokens) < LONG:
        return None
    a, b, c, d, e, f = tokens[-LONG:]
    short = e * BASE + f
    long = (a * BASE + b) * BASE_4 + (c * BASE + d) * BASE_2 + short
    return Keys(long * SPREAD & MASK, short * SPREAD & MASK)


def hashes(token_ids: npt.NDArray[np.integer]) -> tuple[Hashes, Hashes]:
    """Return the hashes of the LONG and of the SHORT tokens [N - LONG + 1] that end at each token
    from LONG - 1 on."""
    tokens = token_ids.astype(np.uint64)
    short = tokens[:-1] * np.uint64(BASE) + tokens[1:]  # [i]: of tokens i and i + 1
    long = short[:-4] * np.uint64(BASE_4) + short[2:-2] * np.uint64(BASE_2) + short[4:]
    spread, mask = np.uint64(SPREAD), np.uint64(MASK)
    return long * spread & mask, short[LONG - SHORT :] * spread & mask


class Chains:
    """Chains of the places of runs of one length, by hash."""

    def __init__(self, bits: int) -> None:
        self.shift = HASH_BITS - bits
        self.newest = array("i", [NOTHING]) * (1 << bits)
        self.before = array("i")

    def add(self, place: int, key: int) -> None:
        """Add a place at the head of the chain of its hash."""
        bucket = key >> self.shift
        self.before[place] = self.newest[bucket]
        self.newest[bucket] = place

    def append(self, place: int, key: int) -> None:
        """Append the last place, at the head of the chain of its hash."""
        bucket = key >> self.shift
        self.before.append(self.newest[bucket])
        self.newest[bucket] = place

    def append_run(self, first: int, keys: Seq[int]) -> None:
        """Append places from `first` on, which is the next one, as `append` does."""
        newest, before, shift = self.newest, self.before, self.shift
        for place, key in enumerate(keys, first):
            bucket = key >> shift
            before.append(newest[bucket])
            newest[bucket] = place

    def add_run(self, first: int, keys: Seq[int], mix: int) -> None:
        """Add places from `first` on, as `add` does. mix: XORed to the hashes."""
        newest, before, shift = self.newest, self.before, self.shift
        for place, key in enumerate(keys, first):
            bucket = (key ^ mix) >> shift
            before[place] = newest[bucket]
            newest[bucket] = place

    def fill(self, keys: Hashes, first: int) -> None:
        """Add places from `first` on to empty chains of at most 16 bits. keys: [N]."""
        assert self.shift >= HASH_BITS - 16, "stable sorting is fast for short numbers only"
        buckets = (keys >> np.uint64(self.shift)).astype(np.uint16)
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], (order + first).astype(np.int32)
        is_next = buckets[1:] == buckets[:-1]
        np.frombuffer(self.before, np.int32)[places[1:][is_next]] = places[:-1][is_next]
        np.frombuffer(self.newest, np.int32)[buckets] = places  # the last write to a bucket remains


class RunIndex:
    """Tokens and the chains of their places."""

    def __init__(self, num_tokens: int) -> None:
        """Create an empty index for about `num_tokens` tokens."""
        bits = min(max((num_tokens - 1).bit_length(), 8), 18)
        self.tokens = array("i")
        self._long, self._short = Chains(bits), Chains(bits)

    def reserve(self, num: int) -> None:
        """Add `num` places without tokens."""
        nothing = array("i", [NOTHING]) * num
        for numbers in (self.tokens, self._long.before, self._short.before):
            numbers.extend(nothing)

    def clear(self, first: int, num: int) -> None:
        """Remove the tokens of `num` places from `first` on."""
        self.tokens[first : first + num] = array("i", [NOTHING]) * num

    def write(self, place: int, token_id: int, keys: Keys | None, mix: int = 0) -> None:
        """Write a token that follows runs with these hashes. mix: XORed to select own chains."""
        self.tokens[place] = token_id
        if keys is not None:
            self._long.add(place, keys.long ^ mix)
            self._short.add(place, keys.short ^ mix)

    def append(self, token_id: int, keys: Keys | None) -> None:
        """Append a token that follows runs with these hashes."""
        place = len(self.tokens)
        self.tokens.append(token_id)
        if keys is None:
            self._long.before.append(NOTHING)
            self._short.before.append(NOTHING)
        else:
            self._long.append(place, keys.long)
            self._short.append(place, keys.short)

    def write_run(self, place: int, token_ids: Ints, keys: RunKeys, mix: int) -> None:
        """Write tokens from a place on, as `write` does for each."""
        self.tokens[place : place + len(token_ids)] = token_ids
        self._long.add_run(place, keys.long, mix)
        self._short.add_run(place, keys.short, mix)

    def append_run(self, token_ids: Ints, keys: RunKeys) -> None:
        """Append tokens, as `append` does for each."""
        place = len(self.tokens)
        self.tokens.extend(token_ids)
        self._long.append_run(place, keys.long)
        self._short.append_run(place, keys.short)

    def fill(self, token_ids: npt.NDArray[np.integer]) -> None:
        """Write the first tokens `[N]` at once; N is at least LONG."""
        self.reserve(len(token_ids))
        np.frombuffer(self.tokens, np.int32)[:] = token_ids
        long, short = hashes(token_ids[:-1])  # no token follows the last run yet
        self._long.fill(long, LONG)
        self._short.fill(short, LONG)

    def find(
        self, last: Ints, keys: Keys, mix: int = 0, may_use: Callable[[int], bool] | None = None
    ) -> Match:
        """Return the longest earlier match of the last tokens, with its places, newest first. Only
        the MAX_PLACES newest of a chain are compared. last: tokens to compare, LONG or more;
        keys: hashes of their end; mix: as in `write`; may_use: filter of places."""
        for chains, key, best in (
            (self._long, keys.long, LONG),
            (self._short, keys.short, SHORT),
        ):
            found = list[int]()
            place, before = chains.newest[(key ^ mix) >> chains.shift], chains.before
            for _ in range(MAX_PLACES):
                if place < 0 or place in found:
                    break
                if may_use is None or may_use(place):
                    same = self._num_same(last, place)
                    if same > best:
                        best, found = same, [place]
                    elif same == best:
                        found.append(place)
                place = before[place]
            if found:
                return best, found
        return 0, []

    def _num_same(self, last: Ints, place: int) -> int:
        """Return how many tokens before a place equal the end of `last`."""
        tokens, num = self.tokens, len(last)
        if tokens[max(0, place - num) : place] == last:
            return num
        same, max_tokens = 0, min(num, place)
        while same < max_tokens and tokens[place - 1 - same] == last[num - 1 - same]:
            same += 1
        return same
