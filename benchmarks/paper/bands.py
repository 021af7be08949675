"""Bands around published numbers: what a figure must show to count as reproduced.

The bands are set from the texts, not from our results. Their widths:

`near`     a quarter to either side of a published number, unless the figure gives a reason for
           another share. Step times come from data sheets, and the papers omit the spread of
           lengths; neither is known to better than a quarter.
`within`   a published range, with a tenth more at both ends, since its ends are rounded.
`order`    a limit that follows from a sentence of the text that gives no number. Most have one
           end; the other is ANY. Without a sentence the limit guards our own result, and does not
           count as reproduced.
`missed`   the published number cannot follow from the texts; the band is what can follow.

A finding outside its band ends `python -m benchmarks.paper` with 1 and fails the tests.
"""

import math

from benchmarks.paper.figure import MISSED, ORDER, OWN, VALUE, Finding

ANY = math.inf  # the upper end of a band with a lower limit only
SHARE = 0.25  # of a published number, to either side
EDGE = 0.1  # of the ends of a published range
QUARTER = "a quarter to either side: step times and the spread of lengths are not known better"
ENDS = "the published range, its ends rounded by a tenth"


def near(
    what: str,
    ours: float,
    published: float,
    share: float = SHARE,
    unit: str = "",
    why: str = QUARTER,
) -> Finding:
    """Return a finding that must lie near a published number."""
    shown = f"{published:,g}{unit}"
    low, high = published / (1 + share), published * (1 + share)
    return Finding(what, ours, low, high, shown, unit, VALUE, why)


def within(what: str, ours: float, low: float, high: float, unit: str = "") -> Finding:
    """Return a finding that must lie in a published range."""
    shown = f"{low:g} to {high:g}{unit}"
    return Finding(what, ours, low / (1 + EDGE), high * (1 + EDGE), shown, unit, VALUE, ENDS)


def order(
    what: str, ours: float, low: float, high: float, published: str, why: str, unit: str = ""
) -> Finding:
    """Return a finding that follows from a sentence without a number; without any sentence, it only
    guards our own result."""
    return Finding(what, ours, low, high, published, unit, ORDER if published else OWN, why)


def missed(
    what: str, ours: float, low: float, high: float, published: str, why: str, unit: str = ""
) -> Finding:
    """Return a finding whose published number cannot follow; why: the proof in a line."""
    return Finding(what, ours, low, high, published, unit, MISSED, why)


def falling(values: list[float]) -> float:
    """Return the smallest quotient of a value and the next one: at least 1 if they fall."""
    return min(first / second for first, second in zip(values, values[1:], strict=False))
