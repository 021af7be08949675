"""Clocks that time-free code is given, and limits of durations.

Durations from outside may be any number. But `epoll` accepts at most 24 days, and a loop that waits
for ever cannot show that it is alive. So requested durations have a limit, and so has each wait.
"""

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Clock in seconds since some fixed point; it never goes backwards."""

    def now(self) -> float: ...


class MonotonicClock:
    now = staticmethod(time.monotonic)


class FakeClock:
    """Clock that moves only by `advance`, for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def now(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


MAX_DURATION_S = 366 * 86400.0  # limit for durations in requests and flags
MAX_WAIT_S = 1.0  # limit for one wait; longer waits are split


def is_duration(seconds: float) -> bool:
    """Return whether this is a valid duration: from 0 to MAX_DURATION_S seconds."""
    return 0.0 <= seconds <= MAX_DURATION_S  # False for NaN


def duration_rule(otherwise: str) -> str:
    """Return the rule for durations, for an error message. otherwise: the meaning of 0."""
    return f"a number of seconds from 0 ({otherwise}) to {MAX_DURATION_S:.0f}, a year"


def bounded_wait_s(seconds: float | None, limit_s: float = MAX_WAIT_S) -> float:
    """Return the duration of the next wait for an event `seconds` away (None: unknown).

    The result is from 0 to `limit_s`."""
    if seconds is None or math.isnan(seconds):
        return limit_s
    return max(0.0, min(seconds, limit_s))
