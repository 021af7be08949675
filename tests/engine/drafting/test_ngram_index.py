"""The index of token runs, filled in bulk or token by token, and its look-ups."""

import random
from array import array

import numpy as np
import pytest

from quire.engine.drafting.ngram_index import LONG, MAX_PLACES, Match, RunIndex, keys_of


def one_by_one(tokens: list[int]) -> RunIndex:
    places = RunIndex(1000)
    for token_id in tokens:
        places.append(token_id, keys_of(places.tokens))
    return places


def found_in(places: RunIndex, last: list[int]) -> Match:
    keys = keys_of(array("i", last))
    assert keys is not None
    return places.find(array("i", last), keys)


@pytest.mark.parametrize("num_tokens", [LONG, LONG + 1, LONG + 2, 40, 700])
def test_bulk_fill_equals_single_appends(num_tokens: int) -> None:
    choose = random.Random(num_tokens)
    tokens = [choose.randrange(3) for _ in range(num_tokens)]
    single, whole = one_by_one(tokens), RunIndex(1000)
    whole.fill(np.array(tokens, np.int32))
    for _ in range(40):
        last = [choose.randrange(3) for _ in range(12)]
        assert found_in(whole, last) == found_in(single, last)
    for token_id in last * 2:  # both indexes grow alike
        for places in (single, whole):
            places.append(token_id, keys_of(places.tokens))
    assert found_in(whole, last) == found_in(single, last) != (0, [])


def test_frequent_run_returns_its_newest_places() -> None:
    places = one_by_one([7, 8, 9] * 100)
    length, found = found_in(places, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (length, found) == (2, [299 - 3 * i for i in range(MAX_PLACES)])


def test_large_token_ids_are_found() -> None:
    tokens = [2**31 - 1 - i for i in range(20)]
    places = one_by_one(tokens)
    whole = RunIndex(1000)
    whole.fill(np.array(tokens, np.int32))
    assert found_in(places, tokens[:10]) == found_in(whole, tokens[:10]) == (10, [10])
