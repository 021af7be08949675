"""Warnings that could come thousands of times: the first at once, then the rest as a number."""

import logging

from quire.base.clock import Clock

logger = logging.getLogger("quire")

EVERY_S = 60.0


class ThrottledLog:
    """At most one warning a minute of each kind. For one thread."""

    def __init__(self, clock: Clock, every_s: float = EVERY_S) -> None:
        self._clock = clock
        self._every_s = every_s
        self._last_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}
        self.counts: dict[str, int] = {}  # of each kind, since the start

    def warn(self, kind: str, message: str) -> None:
        now, last = self._clock.now(), self._last_s.get(kind)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if last is not None and now < last + self._every_s:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        unsaid = self._unsaid.pop(kind, 0)
        self._last_s[kind] = now
        since = f" ({unsaid} more since the last warning)" if unsaid else ""
        logger.warning("%s%s", message, since)
