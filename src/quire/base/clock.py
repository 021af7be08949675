"""Time: the clock that pure rooms are handed, and bounds of durations.

What comes from outside may be any number: `epoll` takes no more than 24 days, and a loop that waits
for ever cannot show that it lives. So a duration has a limit when it is requested, and a wait has
one where it is made.
"""

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed point; never goes back."""

    def now(self) -> float: ...


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def now(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


MAX_DURATION_S = 366 * 86400.0  # a request or a flag may name no more
MAX_WAIT_S = 1.0  # of one wait; longer waits are made of several


def is_duration(seconds: float) -> bool:
    """Tell whether this is a number of seconds that may be asked for, from 0 to MAX_DURATION_S."""
    return 0.0 <= seconds <= MAX_DURATION_S  # not so for what is no number (NaN)


def duration_rule(otherwise: str) -> str:
    """Return what a duration must be, for an error. otherwise: what 0 means."""
    return f"a number of seconds from 0 ({otherwise}) to {MAX_DURATION_S:.0f}, a year"


def bounded_wait_s(seconds: float | None, most_s: float = MAX_WAIT_S) -> float:
    """Return how long to wait now for what is so many seconds away; None is not known. Never
    negative, and never more than most_s."""
    if seconds is None or math.isnan(seconds):
        return most_s
    return max(0.0, min(seconds, most_s))
