"""Draft tokens from a sequence's own tokens, compared with a full search."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.drafting.drafting import repeated
from quire.ops.host.native import core
from quire.ops.sampling.find_runs import find_runs, find_runs_reference

Find = Callable[..., np.ndarray]
FINDS: list[Find] = [find_runs_reference] if core() is None else [find_runs_reference, find_runs]


def naive(
    tokens: list[int], min_length: int, max_length: int, num: int, first: int = 0
) -> list[int]:
    """Return the tokens after the newest earlier occurrence, from `first` on, of the longest run.
    Drafts that reach the end go on with their own first tokens."""
    for n in range(max_length, min_length - 1, -1):
        for end in range(len(tokens) - 1, max(n, first) - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                draft: list[int] = []
                while len(draft) < num:
                    draft.append((tokens + draft)[end + len(draft)])
                return draft
    return []


def drafts(find: Find, lines: list[list[int]], *bounds: int, num: int = 4) -> list[list[int]]:
    """Return the drafts of some lines, stored in reverse order with random tokens after them."""
    table = np.random.default_rng(0).integers(0, 4, (len(lines) + 2, 200), dtype=np.int32)
    rows = np.arange(len(lines), 0, -1, dtype=np.int64)
    lengths = np.array([len(line) for line in lines], np.int64)
    for row, line in zip(rows, lines, strict=True):
        table[row, : len(line)] = line
    places = find(table, rows, lengths, *bounds).tolist()
    return [
        [] if place < 0 else repeated(table[row, :length], place, num)
        for row, length, place in zip(rows, lengths, places, strict=True)
    ]


LINES = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=5)


@pytest.mark.parametrize("find", FINDS)
@given(
    lines=LINES, min_length=st.integers(1, 3), more=st.integers(0, 3), searched=st.integers(1, 80)
)
def test_drafts_equal_those_of_a_plain_search(
    find: Find, lines: list[list[int]], min_length: int, more: int, searched: int
) -> None:
    wanted = [
        naive(line, min_length, min_length + more, 4, first=len(line) - searched) for line in lines
    ]
    assert drafts(find, lines, min_length, min_length + more, searched) == wanted


@pytest.mark.parametrize("find", FINDS)
def test_repetitive_lines_all_get_whole_drafts(find: Find) -> None:
    choose = random.Random(1)
    lines = [[choose.randrange(4) for _ in range(150)] for _ in range(20)]
    found = drafts(find, lines, 2, 4, 1000)
    assert found == [naive(line, 2, 4, 4) for line in lines]
    assert all(len(each) == 4 for each in found)


@pytest.mark.parametrize("find", FINDS)
def test_draft_continues_a_repeating_end(find: Find) -> None:
    assert drafts(find, [[9, 1, 2, 1, 2, 1]], 2, 3, 100, num=5) == [[2, 1, 2, 1, 2]]


@pytest.mark.parametrize("find", FINDS)
def test_new_end_gets_no_draft(find: Find) -> None:
    assert drafts(find, [[], [1], [1, 2, 3, 1]], 2, 3, 100) == [[], [], []]
