"""Histograms give the same buckets for values in bulk and one by one, bucket bounds included."""

import numpy as np
import pytest

from quire.engine.observability.metrics import (
    FEW_VALUES,
    REQUEST_S,
    TOKEN_S,
    Histogram,
    tokens_up_to,
)


def test_bucket_includes_its_bound_and_the_last_is_unbounded() -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.0, 1.0, 1.5, 2.0, 5.0, 6.0, 1e9):
        histogram.observe(value)
    assert histogram.cumulative() == [2, 4, 5, 7]
    assert histogram.total == pytest.approx(15.5 + 1e9)


@pytest.mark.parametrize("num", [FEW_VALUES, FEW_VALUES + 1, 1000])
def test_observe_all_equals_observing_one_by_one(num: int) -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, num)
    values[:3] = TOKEN_S[0], TOKEN_S[5], TOKEN_S[-1]
    in_bulk, singly = Histogram(TOKEN_S), Histogram(TOKEN_S)
    in_bulk.observe_all(values)
    in_bulk.observe_all(np.empty(0))
    for value in values.tolist():
        singly.observe(value)
    assert in_bulk.cumulative() == singly.cumulative()
    assert in_bulk.cumulative()[-1] == num
    assert in_bulk.total == pytest.approx(singly.total)


def test_token_bounds_end_at_the_limit() -> None:
    assert tokens_up_to(64) == (1, 2, 5, 10, 20, 50)
    assert tokens_up_to(100)[-1] == 100
    assert tokens_up_to(1) == (1,)


@pytest.mark.parametrize("bounds", [TOKEN_S, REQUEST_S, tokens_up_to(10**6)])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
