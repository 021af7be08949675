"""Combinations of test parameters of which `make test` runs enough to have each pair of values."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def in_pairs(*values: Sequence[Any]) -> list[ParameterSet]:
    """Return all combinations for `parametrize`, most of them marked as slow.

    A combination stays quick where the index of its last value is the sum of the other indices,
    modulo the number of last values. So each pair of values has a quick combination, if at least
    two of the other parameters have as many values as the last one or more.
    """
    found = []
    for indices in itertools.product(*(range(len(each)) for each in values)):
        *others, last = indices
        is_quick = sum(others) % len(values[-1]) == last
        chosen = (each[index] for each, index in zip(values, indices, strict=True))
        found.append(pytest.param(*chosen, marks=() if is_quick else pytest.mark.slow))
    return found
