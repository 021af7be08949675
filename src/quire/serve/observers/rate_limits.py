"""How many requests and tokens each key may have in a minute: token buckets, which all API
processes of a server share.

A bucket holds one minute's worth, and fills evenly. What it is, is one number: when it will be full
again, on the machine's monotonic clock. The numbers are in memory that the supervisor makes and its
children inherit, so a process that is started anew knows them, and whichever process gets a request
judges by the same one. Index regions of that memory, in doubles:

    [2 * key]      the bucket of requests
    [2 * key + 1]  that of tokens
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
SLACK_S = 1e-6  # of sums of doubles
DOUBLE = struct.Struct("d")


@dataclass(frozen=True)
class Refused:
    """kind: of what there is not enough; wait_s: until there is."""

    kind: str
    limit: int
    wait_s: float


@dataclass(frozen=True)
class Level:
    """How full a bucket is. full_s: seconds until it is full."""

    limit: int
    num_left: int
    full_s: float


def make_memory(num_keys: int) -> int:
    """Return a descriptor of memory in which all buckets are full; children inherit it by
    `pass_fds`. num_keys: of the server; without keys all share one pair of buckets."""
    fd = os.memfd_create("quire-rates")
    os.ftruncate(fd, max(1, num_keys) * len(KINDS) * DOUBLE.size)
    return fd


class RateLimits:
    """limits: for each key (requests, tokens) a minute; 0 is no limit. fd: of `make_memory`."""

    def __init__(
        self, limits: Sequence[tuple[int, int]], fd: int, clock: Clock | None = None
    ) -> None:
        self._limits = limits
        self._fd = fd
        self._clock = clock or MonotonicClock()
        self._memory = mmap.mmap(fd, 0)

    def admit(self, key: int) -> Refused | None:
        """Take one request of a key; return why it may not have it, if so: it needs one whole
        request, and one token at least. How many tokens it takes say `reserve` and `charge`."""
        now = self._clock.now()
        with self._locked():
            for kind in range(len(KINDS)):
                if (refused := self._refused(key, kind, 1, now)) is not None:
                    return refused
            self._take(key, 0, 1, now)
        return None

    def reserve(self, key: int, num_tokens: int) -> Refused | None:
        """Take the tokens that a request may come to, or none; return why not, if so. One that may
        come to more than a whole bucket needs a full one."""
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
        """Take tokens, also more than there are: then the key waits until they have come. Negative:
        give back."""
        if num_tokens:
            with self._locked():
                self._take(key, TOKENS, num_tokens, self._clock.now())

    def levels(self, key: int) -> dict[str, Level]:
        """Return the levels of those buckets of a key that have a limit, by kind."""
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
            DOUBLE.pack_into(self._memory, self._place(key, kind), full_at_s)

    def _debt_s(self, key: int, kind: int, now: float) -> float:
        """Return how long a bucket takes to be full."""
        (full_at_s,) = DOUBLE.unpack_from(self._memory, self._place(key, kind))
        return float(max(0.0, full_at_s - now))

    @staticmethod
    def _place(key: int, kind: int) -> int:
        return (len(KINDS) * key + kind) * DOUBLE.size

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out for some microseconds; the kernel ends a dead one's lock."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
