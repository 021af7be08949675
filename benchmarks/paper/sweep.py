"""Normalized latency against request rate, and the highest rate that a system sustains.

A rate is sustained if the normalized latency stays below a limit, however long the trace is. In a
short trace it also stays below the limit at rates where the queue grows, since the queue has not
grown long yet. So a sustained rate is at most the throughput of the most loaded trace: the requests
per second that a full system serves, by tokens. `figures/trace_lengths.py` shows how both depend on
the length of a trace.

Rates are doubled until a system cannot serve them, and the interval is halved from there; all
points that were tried make the curve.
"""

import math
from collections.abc import Callable
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

    @property
    def throughput(self) -> float:
        """Requests per second that the system serves at the highest rate, by tokens."""
        return self.points[-1].throughput

    def sustained(self, limit_s: float = LIMIT_S) -> float:
        """Return the highest rate below which the latency stays below a limit and no queue
        grows."""
        return min(self.crossing(limit_s), self.throughput)

    def crossing(self, limit_s: float = LIMIT_S) -> float:
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

    def is_served(rate: float) -> bool:
        seconds = max(effort.seconds, MIN_REQUESTS / rate)
        offered = replace(load, rate_per_s=rate, seconds=seconds)
        found[rate] = serve(system, setting, offered, options)
        return found[rate].latency_s < LIMIT_S and not found[rate].is_saturated

    low, high = _interval(load.rate_per_s, is_served)
    if effort.is_full:
        is_served(low / 2)  # the beginning of the curve
    for _ in range(effort.halvings):
        middle = math.sqrt(low * high)
        if is_served(middle):
            low = middle
        else:
            high = middle
    return Sweep(system, [found[rate] for rate in sorted(found)])


def _interval(first: float, is_served: Callable[[float], bool]) -> tuple[float, float]:
    """Return a rate that is served and the double of it that is not. first: where to begin."""
    rate = first
    if is_served(rate):
        for _ in range(MAX_DOUBLINGS):
            if not is_served(2 * rate):
                return rate, 2 * rate
            rate *= 2
    else:
        for _ in range(MAX_DOUBLINGS):
            if is_served(rate / 2):
                return rate / 2, rate
            rate /= 2
    raise ValueError(f"no rate near {first:g} requests/s is the highest that is served")
