"""Bands around published numbers."""

import pytest

from benchmarks.paper.bands import falling, missed, near, order, within
from benchmarks.paper.figure import MISSED, ORDER, OWN, VALUE


def test_near_allows_a_quarter_in_both_directions() -> None:
    for ours, holds in ((1.59, False), (1.61, True), (2.49, True), (2.51, False)):
        found = near("a rate", ours, 2.0)
        assert found.holds == holds and found.standing == VALUE, ours
    assert near("a share", 20.0, 20.4, 0.15, " %").published == "20.4 %"


def test_within_rounds_both_ends() -> None:
    for ours, holds in ((1.5, False), (1.6, True), (2.9, True), (3.0, False)):
        assert within("a rate", ours, 1.7, 2.7).holds == holds, ours


def test_bands_have_standings_and_reasons() -> None:
    assert order("a", 1.0, 0.0, 2.0, "as good", "why").standing == ORDER
    assert order("a", 1.0, 0.0, 2.0, "", "why").standing == OWN
    found = missed("a", 1.5, 1.0, 1.9, "2", "the batches")
    assert found.standing == MISSED and found.why == "the batches" and found.holds


def test_falling_finds_the_smallest_quotient() -> None:
    assert falling([8.0, 4.0, 2.0]) == 2.0
    assert falling([8.0, 4.0, 5.0]) == pytest.approx(0.8)
