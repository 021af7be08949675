"""Choose which cases of a long list `make test` runs; mark the others as slow."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all cases; those that are not quick are slow."""
    return [pytest.param(n, marks=[] if n in quick else pytest.mark.slow) for n in cases]


def in_turn(*factors: Sequence[Any]) -> list[Any]:
    """Return parameters for all combinations of the factors' values.

    `make test` runs as many as the longest factor has values: each time the next value of each.
    """
    longest = max(map(len, factors))
    quick = {tuple(k % len(factor) for factor in factors) for k in range(longest)}
    cases = product(*(enumerate(factor) for factor in factors))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=[] if tuple(place for place, _ in case) in quick else [pytest.mark.slow],
        )
        for case in cases
    ]


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Return parameters for all combinations of the factors' values.

    `make test` runs a subset in which each value of a factor meets each value of every other one.
    Values may be `pytest.param(...)`; combinations with a marked value keep its marks.
    """
    values = [[each if _is_param(each) else pytest.param(each) for each in f] for f in factors]
    cases = list(product(*values))
    chosen = _covering([_places(case, values) for case in cases if not _marks(case)])
    return [
        pytest.param(
            *(each.values[0] for each in case),
            marks=_marks(case) or ([] if _places(case, values) in chosen else [pytest.mark.slow]),
        )
        for case in cases
    ]


def _covering(cases: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Choose greedily: each time the first case that has the most pairs not seen yet."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set[Any]().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def _places(case: tuple[Any, ...], values: list[list[Any]]) -> tuple[int, ...]:
    return tuple(each.index(value) for value, each in zip(case, values, strict=True))


def _is_param(value: Any) -> bool:
    return isinstance(value, type(pytest.param()))


def _marks(case: tuple[Any, ...]) -> list[Any]:
    return [mark for each in case for mark in each.marks]
