"""Time, as an argument: the pure rooms are handed `now` and never read a clock."""

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
