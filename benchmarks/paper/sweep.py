"""Normalized latency against request rate, and the highest rate that a system sustains.

A rate is sustained if the normalized latency stays below a limit. Rates are doubled until it does
not, and the interval is halved from there; all points that were tried make the curve.
"""

import math
from dataclasses import dataclass, replace

from benchmarks.paper.figure import Curve, Effort
from benchmarks.paper.settings import Load, Setting
from benchmarks.paper.systems import PLAIN, Options, Served, serve

LIMIT_S = 0.5  # per output token, where the paper's curves have turned upwards
OTHER_LIMITS_S = (0.25, 1.0)
MAX_DOUBLINGS = 12
MIN_REQUESTS = 40


@dataclass(frozen=True)
class Sweep:
    """Points of one system, by rate."""

    system: str
    points: list[Served]

    @property
    def curve(self) -> Curve:
        return Curve(
            self.system,
            [each.rate_per_s for each in self.points],
            [each.latency_s for each in self.points],
        )

    def sustained(self, limit_s: float = LIMIT_S) -> float:
        """Return the rate at which the latency reaches a limit, between two points on logarithms of
        both."""
        last = self.points[0]
        if last.latency_s >= limit_s:
            return last.rate_per_s
        for point in self.points[1:]:
            if point.latency_s >= limit_s:
                span = math.log(point.latency_s / last.latency_s)
                share = math.log(limit_s / last.latency_s) / span if span > 0 else 1.0
                return last.rate_per_s * (point.rate_per_s / last.rate_per_s) ** share
            last = point
        return last.rate_per_s

    def at(self, rate_per_s: float) -> Served:
        """Return the point nearest to a rate."""
        return min(self.points, key=lambda each: abs(math.log(each.rate_per_s / rate_per_s)))


def sweep(
    system: str, setting: Setting, load: Load, effort: Effort, options: Options = PLAIN
) -> Sweep:
    """Seek the rate that a system sustains. load: its rate is where to begin; its seconds are
    stretched where few requests would come."""
    found: dict[float, Served] = {}

    def is_sustained(rate: float) -> bool:
        seconds = max(effort.seconds, MIN_REQUESTS / rate)
        offered = replace(load, rate_per_s=rate, seconds=seconds)
        found[rate] = serve(system, setting, offered, options)
        return found[rate].latency_s < LIMIT_S

    low = high = load.rate_per_s
    for _ in range(MAX_DOUBLINGS):
        if is_sustained(high):
            low, high = high, 2 * high
        elif high <= low:
            low, high = low / 2, low / 2
        else:
            break
        if high in found:
            break
    high = min((r for r, p in found.items() if p.latency_s >= LIMIT_S), default=high)
    low = max((r for r, p in found.items() if p.latency_s < LIMIT_S and r < high), default=low)
    for _ in range(effort.halvings):
        middle = math.sqrt(low * high)
        if is_sustained(middle):
            low = middle
        else:
            high = middle
    return Sweep(system, [found[rate] for rate in sorted(found)])
