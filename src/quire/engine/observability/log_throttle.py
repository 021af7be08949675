"""Rate limit for repeated warnings: log the first at once, then a count of the suppressed ones."""

import logging

from quire.base.clock import Clock

logger = logging.getLogger("quire")

EVERY_S = 60.0


class ThrottledLog:
    """Logger of at most one warning of each kind per `every_s` (a minute). Not thread-safe."""

    def __init__(self, clock: Clock, every_s: float = EVERY_S) -> None:
        self._clock = clock
        self._every_s = every_s
        self._last_s: dict[str, float] = {}
        self._num_suppressed: dict[str, int] = {}
        self.counts: dict[str, int] = {}  # warnings of each kind since the start

    def warn(self, kind: str, message: str) -> None:
        now, last = self._clock.now(), self._last_s.get(kind)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if last is not None and now < last + self._every_s:
            self._num_suppressed[kind] = self._num_suppressed.get(kind, 0) + 1
            return
        num_suppressed = self._num_suppressed.pop(kind, 0)
        self._last_s[kind] = now
        since = f" ({num_suppressed} more since the last warning)" if num_suppressed else ""
        logger.warning("%s%s", message, since)
