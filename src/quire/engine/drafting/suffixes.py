"""Drafts from the most frequent continuation of a sequence's last tokens, in its own text and in
other answers (SuffixDecoding, arXiv 2411.04975).

The longest run of last tokens that occurred before is looked up, and its newest places are
compared. Each draft token is the most frequent one at its position. The draft ends when the product
of these frequencies falls too low. Matches advance with each token of the sequence. They are looked
up again only when none of them continues as the sequence does.

A sequence sees all of its own tokens, except the older tokens of a long prompt. Of other sequences
it sees the answers. These are stored in pieces, of which the oldest are overwritten. A sequence
never sees answers to another tenant or under another cache salt. Each piece has one owner, which is
compared with the sequence's owner.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from quire.base.settings.speculation import Suffixes
from quire.engine.drafting.ngram_index import (
    LONG,
    MASK,
    NOTHING,
    Ints,
    Keys,
    Match,
    RunIndex,
    RunKeys,
    hashes,
    keys_of,
)

OWN_TOKENS = 1 << 15  # maximum indexed tokens of a prompt, the newest
OWN_ANSWER = 1 << 10  # expected tokens of an answer; longer answers make chains longer
BULK = 64  # minimum tokens of a prompt that is written at once
RUN = 8  # minimum tokens of an answer that are written at once
PIECE = 128  # places of a piece: nothing, tokens before it, answer tokens, nothing
MAX_OWNERS = 1 << 16
OWNER_SPREAD = 0x9E3779B1


@dataclass(slots=True, eq=False)
class Writer:
    """Position at which a sequence's answer is written."""

    owner: int  # only sequences with the same owner see the answer
    mix: int  # XORed to hashes, so that each owner has its own chains
    piece: int = -1  # index of the piece; -1 before the first
    place: int = 0  # of the next token


class Answers:
    """Newest answers of all sequences, in pieces that are overwritten in turn."""

    def __init__(self, num_pieces: int) -> None:
        self._max_pieces = num_pieces
        self.places = RunIndex(num_pieces * PIECE)
        self._writers: list[Writer] = []  # by piece
        self._num_begun = 0
        self._owners: dict[tuple[str, str], int] = {}
        self._new_owner = count(1)

    def writer(self, tenant: str, cache_salt: str) -> Writer:
        """Return the writer of a new answer. With too many owners, the oldest one is forgotten and
        its earlier answers are no longer seen."""
        key = tenant, cache_salt
        if key not in self._owners:
            if len(self._owners) >= MAX_OWNERS:
                del self._owners[next(iter(self._owners))]
            self._owners[key] = next(self._new_owner)
        owner = self._owners[key]
        return Writer(owner, owner * OWNER_SPREAD & MASK)

    def write(self, writer: Writer, token_id: int, keys: Keys | None, before: Ints) -> None:
        """Append a token to an answer. keys: hashes of the tokens before it, `before`."""
        is_mine = writer.piece >= 0 and self._writers[writer.piece] is writer
        if not is_mine or writer.place % PIECE == PIECE - 1:
            self._begin_piece(writer, before[-LONG:])
        self.places.write(writer.place, token_id, keys, writer.mix)
        writer.place += 1

    def write_run(self, writer: Writer, text: Ints, keys: RunKeys) -> None:
        """Append tokens to an answer, as `write` does for each. text: LONG tokens before them, and
        the tokens; keys: of the tokens."""
        done, num = 0, len(text) - LONG
        while done < num:
            is_mine = writer.piece >= 0 and self._writers[writer.piece] is writer
            if not is_mine or writer.place % PIECE == PIECE - 1:
                self._begin_piece(writer, text[done : done + LONG])
            end = min(num, done + PIECE - 1 - writer.place % PIECE)
            part = RunKeys(keys.long[done:end], keys.short[done:end])
            self.places.write_run(writer.place, text[LONG + done : LONG + end], part, writer.mix)
            writer.place += end - done
            done = end

    def _begin_piece(self, writer: Writer, before: Ints) -> None:
        piece = self._num_begun % self._max_pieces
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
        """Return whether a place is in an answer with the same owner."""
        return self._writers[place // PIECE].owner == writer.owner


class SuffixDrafter:
    """Suffix drafter of one sequence: its tokens, and its matches here and in other answers."""

    def __init__(
        self, settings: Suffixes, num_prompt: int, answers: Answers, writer: Writer
    ) -> None:
        """Create a drafter without tokens. num_prompt: tokens of the prompt."""
        self._settings, self._answers, self._writer = settings, answers, writer
        self._num_prompt = num_prompt
        self._own = RunIndex(min(num_prompt + OWN_ANSWER, OWN_TOKENS))
        self._here: Match = (0, [])
        self._there: Match = (0, [])
        self._keys: Keys | None = None
        self.num_taken = 0

    def extend(self, token_ids: Seq[int]) -> None:
        """Append tokens; tokens after the prompt are also written to the answers."""
        if self.num_taken == 0 and min(self._num_prompt, len(token_ids)) >= BULK:
            prompt, token_ids = token_ids[: self._num_prompt], token_ids[self._num_prompt :]
            self._own.fill(np.array(prompt[-OWN_TOKENS:], np.int32))
            self._keys = keys_of(self._own.tokens)
            self.num_taken = len(prompt)
        last = len(token_ids) - RUN if self._num_prompt >= LONG else -1
        for number, token_id in enumerate(token_ids):
            if number <= last and self.num_taken >= self._num_prompt and not self._has_match:
                self._add_run(token_ids[number:])
                return
            self._add(token_id)

    @property
    def _has_match(self) -> bool:
        return bool(self._here[1] or self._there[1])

    def _add_run(self, token_ids: Seq[int]) -> None:
        """Add tokens of the answer at once, while there is no match to follow."""
        own = self._own
        text = own.tokens[-LONG:] + array("i", token_ids)
        long, short = hashes(np.frombuffer(text, np.int32))
        keys = RunKeys(long.tolist(), short.tolist())
        self._keys = Keys(keys.long.pop(), keys.short.pop())
        if self._settings.num_answers:
            self._answers.write_run(self._writer, text, keys)
        own.append_run(text[LONG:], keys)
        self.num_taken += len(token_ids)

    def _add(self, token_id: int) -> None:
        own, keys = self._own, self._keys
        if self._here[1]:
            self._here = _follow(own, self._here, token_id)
        if self._settings.num_answers and self.num_taken >= self._num_prompt:
            if self._there[1]:
                self._there = _follow(self._answers.places, self._there, token_id)
            self._answers.write(self._writer, token_id, keys, own.tokens)
        own.append(token_id, keys)
        length = min(self._here[0], LONG + 1)
        if self._here[1] and own.tokens[-length:] == own.tokens[max(0, LONG - length) : LONG]:
            self._here = 0, []  # the first indexed place is a continuation as well
        self._keys = keys_of(own.tokens)
        self.num_taken += 1

    def propose(self, num: int, ahead: Seq[int] = ()) -> list[int]:
        """Return up to `num` draft tokens; an empty list if the last tokens have no match. ahead:
        draft tokens that are already chosen, which these follow."""
        if self._keys is None:
            return []
        if ahead:
            return self._propose_after(ahead, num)
        own, settings = self._own, self._settings
        last = own.tokens[-settings.depth :]
        if not self._here[1]:
            self._here = own.find(last, self._keys)
        length, places = self._here
        runs = [_repeated(own.tokens[place : place + num], num) for place in places]
        expected, draft_ids = self._choose(length, runs, num)
        if expected == num or not settings.num_answers:
            return draft_ids
        expected_there, draft_there = self._draft_there(last, self._keys, num)
        return draft_ids if expected >= expected_there else draft_there

    def _propose_after(self, ahead: Seq[int], num: int) -> list[int]:
        """Return up to `num` draft tokens after draft tokens. The matches stay as they are."""
        own, settings, answers = self._own, self._settings, self._answers
        last = own.tokens[-settings.depth :] + array("i", ahead)
        keys = keys_of(own.tokens[-LONG:] + array("i", ahead))
        assert keys is not None, "propose was called without keys"

        def find(index: RunIndex, *condition: Any) -> tuple[float, list[int]]:
            length, places = index.find(last, keys, *condition)
            runs = [_padded(index.tokens[place : place + num], num) for place in places]
            return self._choose(length, runs, num)

        expected, draft_ids = find(own)
        if expected == num or not settings.num_answers:
            return draft_ids
        is_seen = partial(answers.is_seen_by, self._writer)
        expected_there, draft_there = find(answers.places, self._writer.mix, is_seen)
        return draft_ids if expected >= expected_there else draft_there

    def _draft_there(self, last: Ints, keys: Keys, num: int) -> tuple[float, list[int]]:
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
        """Return how many draft tokens should be accepted, and the draft tokens. runs:
        continuations, newest first; length: matched tokens before them."""
        if not runs:
            return 0.0, []
        settings = self._settings
        max_tokens = min(num, max(1, int(settings.factor * length)))
        ways = [run[:max_tokens].tolist() for run in runs]
        chosen = list[int]()
        chance, expected = 1.0, 0.0
        while len(chosen) < max_tokens:
            ahead = len(chosen)
            if ways.count(ways[0]) == len(ways):  # all continue identically
                rest = ways[0][ahead:]
                if NOTHING in rest:
                    rest = rest[: rest.index(NOTHING)]
                return expected + chance * len(rest), chosen + rest
            nexts = [way[ahead] for way in ways if way[ahead] != NOTHING]
            if not nexts:
                break
            best = max(nexts, key=nexts.count)
            chance *= nexts.count(best) / len(nexts)
            if chance < settings.min_probability:
                break
            chosen.append(best)
            expected += chance
            ways = [way for way in ways if way[ahead] == best]
        return expected, chosen


def _follow(places: RunIndex, match: Match, token_id: int) -> Match:
    """Return the match after one more token: only the places where that token stands remain."""
    length, found = match
    if not found:
        return match
    tokens = places.tokens
    return length + 1, [place + 1 for place in found if tokens[place] == token_id]


def _padded(run: Ints, num: int) -> Ints:
    """Return `num` tokens: a run that the end of the text cuts off, and then nothing."""
    return run + array("i", [NOTHING]) * (num - len(run))


def _repeated(run: Ints, num: int) -> Ints:
    """Return `num` tokens: a run that the end of the text cuts off is repeated."""
    return run if len(run) >= num else (run * (num // len(run) + 1))[:num]
