"""Limits of requests and tokens per minute for each key: token buckets, which all API processes of
a server share.

A bucket holds one minute's amount, and fills evenly. Its state is one number: the time when it will
be full again, on the machine's monotonic clock. The numbers are in memory that the supervisor makes
and its children inherit. So a restarted process knows them, and all processes use the same numbers.
Index regions of that memory, in doubles:

    [2 * key]      bucket of requests
    [2 * key + 1]  bucket of tokens
"""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire.base.clock import Clock, MonotonicClock

PERIOD_S = 60.0
KINDS = ("requests", "tokens")
TOKENS = KINDS.index("tokens")
SLACK_S = 1e-6  # tolerance for rounding errors in sums of doubles
DOUBLE = struct.Struct("d")


@dataclass(frozen=True)
class Refused:
    """Refusal by a limit. kind: requests or tokens; wait_s: seconds until there is enough."""

    kind: str
    limit: int
    wait_s: float


@dataclass(frozen=True)
class Level:
    """Level of a bucket. full_s: seconds until it is full."""

    limit: int
    num_left: int
    full_s: float


def make_memory(num_keys: int) -> int:
    """Return a descriptor of memory in which all buckets are full; children inherit it by
    `pass_fds`. num_keys: keys of the server; without keys all clients share one pair of buckets."""
    fd = os.memfd_create("quire-rates")
    os.ftruncate(fd, max(1, num_keys) * len(KINDS) * DOUBLE.size)
    return fd


class RateLimits:
    """Limits of all keys. limits: (requests, tokens) per minute of each key; 0 means unlimited. fd:
    from `make_memory`."""

    def __init__(
        self, limits: Sequence[tuple[int, int]], fd: int, clock: Clock | None = None
    ) -> None:
        self._limits = limits
        self._fd = fd
        self._clock = clock or MonotonicClock()
        self._memory = mmap.mmap(fd, 0)

    def admit(self, key: int) -> Refused | None:
        """Take one request from a key's bucket, or return the refusal. One whole request and at
        least one token must be left. `reserve` and `charge` then take the tokens."""
        now = self._clock.now()
        with self._locked():
            for kind in range(len(KINDS)):
                if (refused := self._refused(key, kind, 1, now)) is not None:
                    return refused
            self._take(key, 0, 1, now)
        return None

    def reserve(self, key: int, num_tokens: int) -> Refused | None:
        """Take the maximum number of tokens of a request, or return the refusal. A request beyond a
        whole bucket needs a full bucket."""
        now, limit = self._clock.now(), self._limits[key][TOKENS]
        with self._locked():
            refused = self._refused(key, TOKENS, min(num_tokens, limit), now)
            if refused is None:
                self._take(key, TOKENS, num_tokens, now)
        return refused

    def _refused(self, key: int, kind: int, num: int, now: float) -> Refused | None:
        if not (limit := self._limits[key][kind]):
            return None
        wait_s = self._debt_s(key, kind, now) + num * PERIOD_S / limit - PERIOD_S
        return Refused(KINDS[kind], limit, wait_s) if wait_s > SLACK_S else None

    def charge(self, key: int, num_tokens: int) -> None:
        """Take tokens, even more than are left; then the key must wait for the bucket to refill. A
        negative number returns tokens."""
        if num_tokens:
            with self._locked():
                self._take(key, TOKENS, num_tokens, self._clock.now())

    def levels(self, key: int) -> dict[str, Level]:
        """Return the levels of a key's limited buckets, by kind."""
        now, found = self._clock.now(), {}
        for kind, limit in enumerate(self._limits[key]):
            if limit:
                debt_s = self._debt_s(key, kind, now)
                left = int(limit * (PERIOD_S - debt_s + SLACK_S) / PERIOD_S)
                found[KINDS[kind]] = Level(limit, max(0, left), debt_s)
        return found

    def _take(self, key: int, kind: int, num: int, now: float) -> None:
        if limit := self._limits[key][kind]:
            full_at_s = now + self._debt_s(key, kind, now) + num * PERIOD_S / limit
            DOUBLE.pack_into(self._memory, self._offset(key, kind), full_at_s)

    def _debt_s(self, key: int, kind: int, now: float) -> float:
        """Return the seconds until a bucket is full."""
        (full_at_s,) = DOUBLE.unpack_from(self._memory, self._offset(key, kind))
        return float(max(0.0, full_at_s - now))

    @staticmethod
    def _offset(key: int, kind: int) -> int:
        return (len(KINDS) * key + kind) * DOUBLE.size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out other processes for microseconds; the kernel frees a dead process's lock."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
