"""Guesses from a sequence's own tokens, beside a search through all of it."""

import random

import pytest

from quire.engine import ngrams
from quire.engine.ngrams import NGrams


def naive(tokens: list[int], fewest: int, most: int, num: int, first: int = 0) -> list[int]:
    """The newest earlier place, from `first` on, of the longest run; what comes after, and its own
    guess after that."""
    for n in range(most, fewest - 1, -1):
        for end in range(len(tokens) - 1, max(n, first) - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                guess: list[int] = []
                while len(guess) < num:
                    guess.append((tokens + guess)[end + len(guess)])
                return guess
    return []


@pytest.mark.parametrize("seed", range(8))
def test_as_a_search_would_find(seed: int) -> None:
    choose = random.Random(seed)
    fewest = choose.randint(1, 3)
    most = fewest + choose.randint(0, 3)
    grams, tokens, num_found = NGrams(fewest, most), list[int](), 0
    while len(tokens) < 150:
        piece = [choose.randrange(4) for _ in range(choose.randint(0, 5))]
        grams.extend(piece)
        tokens += piece
        wanted = naive(tokens, fewest, most, 4)
        assert grams.guess(4) == wanted, tokens
        num_found += bool(wanted)
    assert num_found > 5


@pytest.mark.parametrize("seed", range(4))
def test_a_long_prompt_is_noted_from_its_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each guess the search reaches further back, and at last it knows all."""
    monkeypatch.setattr(ngrams, "AT_ONCE", 16)
    choose = random.Random(seed)
    tokens = [choose.randrange(6) for _ in range(100)]
    grams = NGrams(2, 4)
    grams.extend(tokens)
    for num_known in [*range(32, 112, 16), 116, 120]:
        wanted = naive(tokens, 2, 4, 3, first=max(0, 100 - num_known))
        assert grams.guess(3) == wanted
        tokens.append(choose.randrange(6))
        grams.extend(tokens[-1:])


def test_an_end_that_repeats_itself() -> None:
    grams = NGrams(2, 3)
    grams.extend([9, 1, 2, 1, 2, 1])
    assert grams.guess(5) == [2, 1, 2, 1, 2]


def test_nothing_is_guessed_after_a_new_end() -> None:
    grams = NGrams(2, 3)
    assert grams.guess(3) == []
    grams.extend([1, 2, 3, 1])
    assert grams.guess(3) == []
