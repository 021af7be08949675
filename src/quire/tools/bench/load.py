"""Arrival times of requests, at a given rate."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """The load of a benchmark."""

    rate_per_s: float
    burstiness: float
    max_concurrency: int | None
    seed: int

    def arrivals_s(self, num: int) -> list[float]:
        """Draw the time of each request's arrival.

        Times are scaled so that the last is num / rate: even a short run has the given rate."""
        if self.rate_per_s == math.inf:
            return [0.0] * num
        rng = np.random.default_rng([self.seed, 2])
        scale = 1.0 / (self.rate_per_s * self.burstiness)
        times = np.cumsum(rng.gamma(self.burstiness, scale, num))
        stretched: list[float] = (times * (num / self.rate_per_s / times[-1])).tolist()
        return stretched
