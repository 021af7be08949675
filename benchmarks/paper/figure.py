"""Parts of a figure of the evaluation: curves, the paper's values, conditions that must hold."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

LINES, BARS = "lines", "bars"


@dataclass(frozen=True)
class Effort:
    """The amount of work.

    seconds: of arrivals in a trace.
    halvings: of the interval in which a rate is sought.
    is_full: False skips panels that repeat others.
    """

    seconds: float
    halvings: int
    is_full: bool


FULL = Effort(120.0, 1, True)
REDUCED = Effort(120.0, 1, False)


@dataclass(frozen=True)
class Curve:
    """Points of ours, or of the paper's if it says so; of bars, x are the positions of `names`."""

    label: str
    x: list[float]
    y: list[float]
    is_published: bool = False


@dataclass(frozen=True)
class Rates:
    """Rates of one system, in requests per second.

    crossing: where the latency reaches the limit; None if it stays below the limit.
    throughput: what the system serves of the most loaded trace.
    """

    system: str
    crossing: float | None
    throughput: float

    @property
    def sustained(self) -> float:
        """The lower one: below it the latency stays below the limit and no queue grows."""
        return self.throughput if self.crossing is None else min(self.crossing, self.throughput)


# The standing of a finding towards a published sentence.
VALUE = "reproduced"  # the band lies around a published number
ORDER = "ordering"  # the text gives an order, a limit or a trend, and the band states it
MISSED = "not reproduced"  # the published number cannot follow; the band states what can
OWN = "own claim"  # no published sentence; the band guards our own result
BEYOND = ""  # the figure is beyond the papers


@dataclass(frozen=True)
class Finding:
    """One number, and the band in which it must lie.

    published: the paper's number, or its range, if it gives one.
    standing: VALUE, ORDER, MISSED, OWN or BEYOND.
    why: the reason for the band's width.
    """

    what: str
    ours: float
    low: float
    high: float
    published: str = ""
    unit: str = ""
    standing: str = BEYOND
    why: str = ""

    @property
    def holds(self) -> bool:
        return self.low <= self.ours <= self.high


@dataclass(frozen=True)
class Figure:
    """One plot and what is said about it. source: where in the papers. text: Markdown, what agrees,
    what does not, and why. names: of the positions on the axis of bars. seconds: of arrivals in
    its traces; None without traces of a set length. rates: of each system of a sweep."""

    name: str
    title: str
    source: str
    x_label: str = ""
    y_label: str = ""
    curves: list[Curve] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    text: str = ""
    kind: str = LINES
    names: list[str] = field(default_factory=list)
    y_limit: float | None = None
    is_log_x: bool = False
    is_log_y: bool = False
    seconds: float | None = None
    rates: list[Rates] = field(default_factory=list)


class Runs(Protocol):
    """Where simulations are run: several at a time, each in a process of its own, or one by one."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]": ...


class HereRuns:
    """One by one, in this process."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


def run_each(runs: Runs, function: Callable[..., Any], cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Run a function for each case of arguments; returns what it gave, in their order."""
    futures = [runs.submit(function, *case) for case in cases]
    return [future.result() for future in futures]
