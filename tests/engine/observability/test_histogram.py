"""Histograms: values in bulk and one by one give the same buckets, bounds included."""

import numpy as np
import pytest

from quire.engine.observability.metrics import (
    FEW_VALUES,
    REQUEST_S,
    TOKEN_S,
    Histogram,
    tokens_up_to,
)


def test_a_bound_is_in_its_bucket_and_the_last_bucket_has_none() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 6.0, 1e9):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 4, 5, 7]
    assert histogram.total == pytest.approx(15.5 + 1e9)


@pytest.mark.parametrize("num", [FEW_VALUES, FEW_VALUES + 1, 1000])
def test_many_values_at_once_count_as_one_by_one(num: int) -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, num)
    values[:3] = TOKEN_S[0], TOKEN_S[5], TOKEN_S[-1]
    at_once, singly = Histogram(TOKEN_S), Histogram(TOKEN_S)
    at_once.observe_all(values)
    at_once.observe_all(np.empty(0))
    for value in values.tolist():
        singly.observe(value)
    assert at_once.cumulative() == singly.cumulative()
    assert at_once.cumulative()[-1] == num
    assert at_once.total == pytest.approx(singly.total)


def test_token_bounds_go_up_to_the_limit() -> None:
    assert tokens_up_to(64) == (1, 2, 5, 10, 20, 50)
    assert tokens_up_to(100)[-1] == 100
    assert tokens_up_to(1) == (1,)


@pytest.mark.parametrize("bounds", [TOKEN_S, REQUEST_S, tokens_up_to(10**6)])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
