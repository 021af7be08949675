"""The comparison of trace lengths: its band can fail, and its text follows from its numbers."""

from dataclasses import replace

import pytest

from benchmarks.paper.figure import FULL, REDUCED, Effort
from benchmarks.paper.figures.trace_lengths import _converged, _short_trace, lengths_of
from benchmarks.paper.sweep import Sweep
from benchmarks.paper.systems import Served


@pytest.mark.parametrize("seconds", [10.0, 120.0, 240.0, 480.0, 3600.0])
@pytest.mark.parametrize("effort", [FULL, REDUCED])
def test_trace_of_at_least_twice_the_length_is_compared(effort: Effort, seconds: float) -> None:
    lengths = lengths_of(replace(effort, seconds=seconds))
    assert seconds in lengths and lengths[-1] >= 2 * seconds
    assert list(lengths) == sorted(set(lengths))


def test_shortest_sufficient_length_is_reported() -> None:
    lengths = (60.0, 120.0, 240.0)
    assert _converged(lengths, (0.2, 0.04, 0.0)).startswith("From 120 s on")
    assert _converged(lengths, (0.01, 0.04, 0.0)).startswith("From 60 s on")
    assert _converged(lengths, (0.01, 0.06, 0.0)).startswith("No length but the longest")


def test_short_trace_is_described_by_its_latency() -> None:
    for latency_s, stays in ((0.4, True), (0.6, False)):
        served = Served("Orca", 1.5, latency_s, 1.0, 1.0, {}, throughput=0.6)
        text = _short_trace(Sweep("Orca", [served]), 30.0)
        assert ("by latency alone" in text) == stays, latency_s
        assert "At 1.5 requests/s for 30 s, Orca serves 0.60" in text
