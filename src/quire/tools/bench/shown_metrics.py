"""The results that a benchmark must show, read from the options before anything runs."""

import argparse
import math
from dataclasses import dataclass

from quire.base.errors import ConfigError
from quire.tools.bench.arguments import METRICS

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class ShownMetrics:
    """The metrics and percentiles to show, and the limits of goodput in milliseconds."""

    shown: tuple[str, ...]
    percentiles: tuple[float, ...]
    limits_ms: dict[str, float]

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "ShownMetrics":
        """Read the options. Raises ConfigError."""
        shown = tuple(name for name in options.percentile_metrics.split(",") if name)
        for name in shown:
            _check_metric(name, "--percentile-metrics", METRICS)
        percentiles = tuple(
            _number(p, "--metric-percentiles", 100.0) for p in options.metric_percentiles.split(",")
        )
        limits: dict[str, float] = {}
        for pair in options.goodput:
            name, _, limit = pair.partition(":")
            _check_metric(name, "--goodput", GOODPUT_METRICS)
            limits[name] = _number(limit, "--goodput", math.inf)
        return cls(shown, percentiles, limits)


def _check_metric(name: str, flag: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{flag} knows {', '.join(known)}, not {name!r}.")


def _number(text: str, flag: str, maximum: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= maximum:
        raise ConfigError(f"{flag}: {text!r} is not a number from 0 to {maximum:g}.")
    return value
