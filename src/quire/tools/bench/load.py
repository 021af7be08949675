"""When requests come, at a given rate."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    rate_per_s: float
    burstiness: float
    max_concurrency: int | None
    seed: int

    def arrivals_s(self, num: int) -> list[float]:
        """Draw when each request is sent. Stretched so that the last one comes at num / rate: the
        rate of the run is the one asked for, also where the run is short."""
        if self.rate_per_s == math.inf:
            return [0.0] * num
        rng = np.random.default_rng([self.seed, 2])
        scale = 1.0 / (self.rate_per_s * self.burstiness)
        times = np.cumsum(rng.gamma(self.burstiness, scale, num))
        stretched: list[float] = (times * (num / self.rate_per_s / times[-1])).tolist()
        return stretched
