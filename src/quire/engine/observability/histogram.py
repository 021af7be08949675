"""Histograms as numpy arrays: a step's values for all its rows are counted at once.

A bucket counts the values up to and including its bound, as Prometheus has it; the last one has no
bound.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

# Seconds between two tokens: fine where people and schedulers notice a difference.
TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0),
)
# Seconds of a request and its parts.
REQUEST_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
STEP_TOKENS = tuple(float(1 << i) for i in range(15))
TIMES = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def tokens_up_to(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, not above `most`."""
    return tuple(_one_two_five(most))


def _one_two_five(most: int) -> Iterator[float]:
    for power in count():
        for digit in (1, 2, 5):
            bound = digit * 10**power
            if bound > most:
                return
            yield float(bound)


class Histogram:
    """How many values fell between which bounds (ascending), and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.total = 0.0
        self._bounds = np.asarray(bounds)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: npt.NDArray[np.float64]) -> None:
        """Count many values at once: [N]."""
        places = self._bounds.searchsorted(values)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.total += float(values.sum())

    def cumulative(self) -> list[int]:
        """Return how many values are up to each bound, and how many there are."""
        return [int(number) for number in self.counts.cumsum()]
