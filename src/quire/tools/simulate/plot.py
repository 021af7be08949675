"""Draw a simulated run as a sheet of charts in SVG: lines and bars. Needs no library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from quire.base.errors import ConfigError
from quire.tools.simulate.results import MS, Results, by_second, served_well
from quire.tools.simulate.run import Run
from quire.tools.simulate.served import Float64

WIDTH, HEIGHT = 470, 250  # size of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44  # margins, in pixels
COLOURS = ("#1f6fb2", "#d1495b", "#2e8b57", "#8a5a9e", "#c98a1b")
NUM_TICKS = 5
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:13px}"
    ".g{stroke:#e3e3e3}.a{stroke:#888;fill:none}.n{font-size:11px}"
)


@dataclass(frozen=True)
class Line:
    """A curve, with points from left to right."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class LineChart:
    """Lines over two axes; the vertical axis starts at 0 and ends at `max_y`, if given."""

    title: str
    x_label: str
    lines: Sequence[Line]
    max_y: float | None = None

    def draw(self) -> list[str]:
        """Return the chart's SVG elements."""
        low = min((x for line in self.lines for x in line.x), default=0.0)
        max_x = max((x for line in self.lines for x in line.x), default=0.0)
        low = 0.0 if low < max_x / 2 else low
        max_y = self.max_y or max((y for line in self.lines for y in line.y), default=0.0)
        across, up = (
            _Axis(low, max_x, LEFT, WIDTH - RIGHT),
            _Axis(0.0, max_y, HEIGHT - BOTTOM, TOP),
        )
        parts = [_text(LEFT, 18, self.title, "t")]
        for value in up.ticks():
            y = up.at(value)
            parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(_text(LEFT - 6, y + 4, _number(value), "n", "end"))
        for value in across.ticks():
            place = _text(across.at(value), HEIGHT - BOTTOM + 16, _number(value), "n", "middle")
            parts.append(place)
        parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 10, self.x_label, "n", "middle"))
        parts.append(f'<path class="a" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        for number, line in enumerate(self.lines):
            colour = COLOURS[number % len(COLOURS)]
            points = " ".join(
                f"{across.at(x)},{up.at(y)}" for x, y in zip(line.x, line.y, strict=True)
            )
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{points}"/>'
            )
            if len(self.lines) > 1 or line.name:
                x = WIDTH - RIGHT - 8
                name = _text(x, TOP + 12 + 15 * number, line.name, "n", "end", colour)
                parts.append(name)
        return parts


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, each with a name and a number in `unit`."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float]] = field(default_factory=tuple)

    def draw(self) -> list[str]:
        """Return the chart's SVG elements."""
        parts = [_text(LEFT, 18, self.title, "t")]
        begin, largest = 190, max((value for _, value in self.bars), default=0.0)
        height = (HEIGHT - TOP - 20) / max(1, len(self.bars))
        for number, (name, value) in enumerate(self.bars):
            y = TOP + number * height
            width = round((WIDTH - begin - 110) * value / largest, 1) if largest else 0
            colour = COLOURS[number % len(COLOURS)]
            parts.append(_text(begin - 8, round(y + height / 2 + 4, 1), name, "n", "end"))
            parts.append(
                f'<rect x="{begin}" y="{y + 4:.1f}" width="{width}" height="{height - 8:.1f}"'
                f' fill="{colour}"/>'
            )
            label = f"{_number(value)} {self.unit}"
            parts.append(_text(begin + width + 6, round(y + height / 2 + 4, 1), label, "n"))
        return parts


def sheet(title: str, facts: Sequence[str], charts: Sequence[LineChart | BarChart]) -> str:
    """Return an SVG sheet with a title, some facts, and charts in two columns."""
    head = 34 + 17 * len(facts)
    height = head + HEIGHT * -(-len(charts) // 2) + 10
    width = 2 * WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(20, 26, title, "t"),
    ]
    parts += [_text(20, 44 + 17 * i, fact, "n") for i, fact in enumerate(facts)]
    for number, chart in enumerate(charts):
        x, y = WIDTH * (number % 2), head + HEIGHT * (number // 2)
        parts += [f'<g transform="translate({x} {y})">', *chart.draw(), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    begins: float
    ends: float

    def at(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.begins + (value - self.low) / span * (self.ends - self.begins), 1)

    def ticks(self) -> list[float]:
        """Return round values along the axis."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step: float = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= NUM_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start", colour: str = "") -> str:
    fill = f' style="fill:{colour}"' if colour else ""
    return (
        f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}"{fill}>{escape(text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


POINTS = 240  # points of a curve


def write_plot(path: Path | None, title: str, facts: list[str], run: Run, results: Results) -> None:
    """Write the sheet if a path is given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sheet(title, facts, charts_of(run, results)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error.strerror}.") from error


def charts_of(run: Run, results: Results) -> list[LineChart | BarChart]:
    """Return the charts: waits, gaps, rows, memory, speed, and a request's time by phase."""
    done = served_well(run)
    waits = np.array([each.wait_s for each in done]) * MS
    tokens, num_open = by_second(run)
    speed, open_ = _shorter(tokens), _shorter(num_open.astype(np.float64))
    spent = results.spent
    bars = [(f"waiting: {name}", value) for name, value in spent.waiting.items()]
    bars += [("prompt", spent.prefill), ("answer", spent.decode)]
    rows, waiting, used = (_over_time(run, name) for name in ("num_rows", "num_waiting", "used"))
    return [
        LineChart("Time to the first token", "ms, share of the requests", [_shares(waits)], 1.0),
        LineChart("Between two tokens", "ms, share of the gaps", [_shares(run.gaps_s * MS)], 1.0),
        LineChart(
            "Sequences, all replicas", "s", [Line("in a step", *rows), Line("waiting", *waiting)]
        ),
        LineChart("KV pool in use", "s, share of the fullest replica", [Line("", *used)], 1.0),
        LineChart("Output tokens per second", "s", [Line("", *speed)]),
        LineChart("Requests that are open", "s", [Line("", *open_)]),
        BarChart("Time of a request, on average", "ms", bars),
    ]


def _shares(values: Float64) -> Line:
    """Return the cumulative distribution of values."""
    shares = np.linspace(0, 1, POINTS)
    if not len(values):
        return Line("", [], [])
    return Line("", np.quantile(values, shares).tolist(), shares.tolist())


def _shorter(values: Float64) -> tuple[list[float], list[float]]:
    """Return times in seconds and means, so that a curve has at most POINTS points."""
    size = max(1, -(-len(values) // POINTS))
    edges = np.arange(0, len(values), size)
    counts = np.diff([*edges, len(values)])
    return (edges + counts / 2).tolist(), (np.add.reduceat(values, edges) / counts).tolist()


def _over_time(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Return means over equal intervals: summed over replicas, but the maximum for `used`."""
    edges = np.linspace(0, max(run.duration_s, 1e-9), POINTS + 1)
    found = []
    for each in run.listeners:
        at_s, values = np.array(each.series.at_s), np.array(getattr(each.series, name), float)
        if not len(at_s):
            continue
        ends_s = np.append(at_s[1:], run.duration_s)
        area = np.concatenate([[0.0], np.cumsum(values * (ends_s - at_s))])
        whole = np.interp(edges, np.append(at_s, run.duration_s), area)
        found.append(np.diff(whole) / np.diff(edges))
    both = np.array(found) if found else np.zeros((1, POINTS))
    total = both.max(0) if name == "used" else both.sum(0)
    return ((edges[1:] + edges[:-1]) / 2).tolist(), total.tolist()
