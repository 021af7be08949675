"""Normalized latency against request rate, and the highest rate that a system sustains.

The sustained rate is the smaller one of two rates. One is the crossing, the rate at which the
normalized latency reaches a limit. The other is the throughput of the most loaded trace: the
requests per second that a full system serves, by tokens. In a short trace the latency stays below
the limit at rates where the queue grows, since the queue has not grown long yet.
`figures/trace_lengths.py` shows how both depend on the length of a trace.

Rates are doubled until a system cannot serve them, and the interval is halved from there; all
points that were tried make the curve.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.paper.figure import Curve, Effort, Rates
from benchmarks.paper.settings import Load, Setting
from benchmarks.paper.systems import PLAIN, Options, Served, serve

LIMIT_S = 0.5  # per output token, where the paper's curves have turned upwards
PLOTTED_S = 1.0  # per output token, where the plots end
MAX_DOUBLINGS = 12
MIN_REQUESTS = 40


@dataclass(frozen=True)
class Sweep:
    """Points of one system, by rate."""

    system: str
    points: list[Served]

    @property
    def curve(self) -> Curve:
        """The points up to the first one above the plot, so that the curve leaves it there."""
        shown = [each for each in self.points if each.latency_s < PLOTTED_S]
        shown += [each for each in self.points if each.latency_s >= PLOTTED_S][:1]
        shown.sort(key=lambda each: each.rate_per_s)
        return Curve(
            self.system, [each.rate_per_s for each in shown], [each.latency_s for each in shown]
        )

    @property
    def rates(self) -> Rates:
        """The two rates that are compared."""
        return Rates(self.system, self.crossing(), self.points[-1].throughput)

    @property
    def sustained(self) -> float:
        """The highest rate below which the latency stays below the limit and no queue grows."""
        return self.rates.sustained

    def crossing(self, limit_s: float = LIMIT_S) -> float | None:
        """Return the rate at which the latency reaches a limit, between two points on logarithms of
        both; None if it stays below."""
        last = self.points[0]
        if last.latency_s >= limit_s:
            return last.rate_per_s
        for point in self.points[1:]:
            if point.latency_s >= limit_s:
                span = math.log(point.latency_s / last.latency_s)
                share = math.log(limit_s / last.latency_s) / span if span > 0 else 1.0
                return last.rate_per_s * (point.rate_per_s / last.rate_per_s) ** share
            last = point
        return None


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
