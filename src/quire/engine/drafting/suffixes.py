"""Guesses at what most often followed a sequence's last tokens, here and in others' answers
(SuffixDecoding, arXiv 2411.04975).

Of the places where the longest run of the sequence's last tokens stands already, the newest are
asked what follows: at each step ahead the most frequent token counts, and how often it came says
whether the guess goes on. What was found is followed from token to token, and looked up anew only
when none of it went on as the sequence did.

A sequence sees all of its own tokens (of a long prompt the newest), and of others what they
answered, in pieces, the oldest of which are overwritten. Nobody sees answers to another tenant, or
under another cache salt: each piece has one owner, and who asks is compared with it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from quire.base.settings.speculation import Suffixes
from quire.engine.drafting.ngram_index import (
    LONG,
    MASK,
    NOTHING,
    Ints,
    Keys,
    Match,
    Places,
    keys_of,
)

OWN_TOKENS = 1 << 15  # of a prompt, the newest, that are looked through
OWN_ANSWER = 1 << 10  # tokens, roughly; more of them make chains longer
BULK = 64  # tokens from which a beginning is put at once
PIECE = 128  # places of a piece of an answer: nothing, what stood before, the answer, nothing
MOST_OWNERS = 1 << 16
OWNER_SPREAD = 0x9E3779B1


@dataclass(slots=True, eq=False)
class Writer:
    """Where a sequence's answer goes on. owner: who may see it."""

    owner: int
    mix: int  # of hashes
    piece: int = -1
    place: int = 0


class Answers:
    """The newest answers to everybody."""

    def __init__(self, num_pieces: int) -> None:
        self._most = num_pieces
        self.places = Places(num_pieces * PIECE)
        self._writers: list[Writer] = []  # of the pieces
        self._num_begun = 0
        self._owners: dict[tuple[str, str], int] = {}
        self._new_owner = count(1)

    def writer(self, tenant: str, cache_salt: str) -> Writer:
        """Begin an answer. An owner who is forgotten, being the oldest of too many, sees no more of
        what there was."""
        key = tenant, cache_salt
        if key not in self._owners:
            if len(self._owners) >= MOST_OWNERS:
                del self._owners[next(iter(self._owners))]
            self._owners[key] = next(self._new_owner)
        owner = self._owners[key]
        return Writer(owner, owner * OWNER_SPREAD & MASK)

    def write(self, writer: Writer, token_id: int, keys: Keys | None, before: Ints) -> None:
        """Add a token to an answer. keys: of the tokens before it, of which `before` has some."""
        is_mine = writer.piece >= 0 and self._writers[writer.piece] is writer
        if not is_mine or writer.place % PIECE == PIECE - 1:
            self._begin_piece(writer, before[-LONG:])
        self.places.write(writer.place, token_id, keys, writer.mix)
        writer.place += 1

    def _begin_piece(self, writer: Writer, before: Ints) -> None:
        piece = self._num_begun % self._most
        self._num_begun += 1
        if piece == len(self._writers):
            self.places.reserve(PIECE)
            self._writers.append(writer)
        first = piece * PIECE
        self.places.clear(first, PIECE)
        self._writers[piece], writer.piece = writer, piece
        writer.place = first + 1 + len(before)
        self.places.tokens[first + 1 : writer.place] = before

    def is_seen_by(self, writer: Writer, place: int) -> bool:
        """Tell whether a place is in an answer to the same owner."""
        return self._writers[place // PIECE].owner == writer.owner


class SuffixGuesser:
    """One sequence's tokens, and where they have led before."""

    def __init__(
        self, settings: Suffixes, num_prompt: int, answers: Answers, writer: Writer
    ) -> None:
        """num_prompt: tokens that are no answer."""
        self._settings, self._answers, self._writer = settings, answers, writer
        self._num_prompt = num_prompt
        self._own = Places(min(num_prompt + OWN_ANSWER, OWN_TOKENS))
        self._here: Match = (0, [])
        self._there: Match = (0, [])
        self._keys: Keys | None = None
        self.num_taken = 0

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens."""
        if self.num_taken == 0 and min(self._num_prompt, len(token_ids)) >= BULK:
            prompt, token_ids = token_ids[: self._num_prompt], token_ids[self._num_prompt :]
            self._own.fill(np.array(prompt[-OWN_TOKENS:], np.int32))
            self._keys = keys_of(self._own.tokens)
            self.num_taken = len(prompt)
        for token_id in token_ids:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        own, keys = self._own, self._keys
        self._here = _follow(own, self._here, token_id)
        if self._settings.num_answers and self.num_taken >= self._num_prompt:
            self._there = _follow(self._answers.places, self._there, token_id)
            self._answers.write(self._writer, token_id, keys, own.tokens)
        own.append(token_id, keys)
        length = min(self._here[0], LONG + 1)
        if own.tokens[-length:] == own.tokens[max(0, LONG - length) : LONG]:
            self._here = 0, []  # the first place that can be found leads here as well
        self._keys = keys_of(own.tokens)
        self.num_taken += 1

    def guess(self, num: int) -> list[int]:
        """Return up to `num` tokens that may come next; none if nothing led here before."""
        if self._keys is None:
            return []
        own, settings = self._own, self._settings
        last = own.tokens[-settings.depth :]
        if not self._here[1]:
            self._here = own.find(last, self._keys)
        length, places = self._here
        runs = [_repeated(own.tokens[place : place + num], num) for place in places]
        expected, guesses = self._choose(length, runs, num)
        if expected == num or not settings.num_answers:
            return guesses
        expected_there, guesses_there = self._guess_there(last, self._keys, num)
        return guesses if expected >= expected_there else guesses_there

    def _guess_there(self, last: Ints, keys: Keys, num: int) -> tuple[float, list[int]]:
        answers, writer = self._answers, self._writer
        length, places = self._there
        is_seen = partial(answers.is_seen_by, writer)
        if places := list(filter(is_seen, places)):
            self._there = length, places
        else:
            self._there = answers.places.find(last, keys, writer.mix, is_seen)
            length, places = self._there
        tokens = answers.places.tokens
        return self._choose(length, [tokens[place : place + num] for place in places], num)

    def _choose(self, length: int, runs: list[Ints], num: int) -> tuple[float, list[int]]:
        """Return how many tokens of the most frequent way on should be right, and these. length:
        how many tokens led to each of the ways, the newest first."""
        if not runs:
            return 0.0, []
        settings = self._settings
        most = min(num, max(1, int(settings.factor * length)))
        ways = [run[:most].tolist() for run in runs]
        chosen = list[int]()
        chance, expected = 1.0, 0.0
        while len(chosen) < most:
            ahead = len(chosen)
            if ways.count(ways[0]) == len(ways):  # all go on alike
                rest = ways[0][ahead:]
                if NOTHING in rest:
                    rest = rest[: rest.index(NOTHING)]
                return expected + chance * len(rest), chosen + rest
            nexts = [way[ahead] for way in ways if way[ahead] != NOTHING]
            if not nexts:
                break
            best = max(nexts, key=nexts.count)
            chance *= nexts.count(best) / len(nexts)
            if chance < settings.least_chance:
                break
            chosen.append(best)
            expected += chance
            ways = [way for way in ways if way[ahead] == best]
        return expected, chosen


def _follow(places: Places, match: Match, token_id: int) -> Match:
    """Keep those places that this token follows."""
    length, found = match
    if not found:
        return match
    tokens = places.tokens
    return length + 1, [place + 1 for place in found if tokens[place] == token_id]


def _repeated(run: Ints, num: int) -> Ints:
    """Let a run that reaches to the end go on as it began."""
    return run if len(run) >= num else (run * (num // len(run) + 1))[:num]
