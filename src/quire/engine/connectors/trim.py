"""Limit of the bytes of all files below a directory, which several processes may write.

Sweeps count the files. A sweep looks at a few thousand files per call, so that no caller waits for
millions of them. It remembers the oldest files, which are deleted until the next sweep. Files of
other processes are noticed only by sweeps. A new sweep begins after a minute, or when this process
has written a sixteenth of the limit.
"""

import contextlib
import heapq
import os
from collections import deque
from collections.abc import Iterator

from quire.base.clock import Clock

SWEEP_S = 60.0
SLACK = 16  # 1/16 of the limit: maximum bytes written between two sweeps, and additional room made
FILES_PER_CALL = 4096
FOLDER_COST = 4  # reading a folder costs as much as so many files
MAX_OLDEST = 1 << 16
DELETED_PER_CALL = 64  # beyond the required room
ENDED = True

Old = tuple[int, int, str]  # modification time in ns, bytes, path


class Trimmer:
    """Trimmer that deletes the least recently used files. suffix: of the files that count and may
    be deleted. They are in folders three levels below `top`."""

    def __init__(self, top: str, suffix: str, max_bytes: int, clock: Clock) -> None:
        self._top = top
        self._suffix = suffix
        self._max_bytes = max_bytes
        self._clock = clock
        self._used: int | None = None  # bytes; None before the first sweep has ended
        self._new_bytes = 0  # written by us since the current or last sweep began
        self._oldest: deque[Old] = deque()  # of the last sweep, not yet deleted
        self._sweep: Iterator[bool] | None = None
        self._swept_s = 0.0

    def make_room(self, num_bytes: int) -> bool:
        """Delete the least recently used files until `num_bytes` fit. Return False if the files
        must be counted first, or if the limit is smaller."""
        if num_bytes > self._max_bytes:
            return False
        self._look_on()
        if self._used is None:
            return False
        if self._used + num_bytes > self._max_bytes:
            self._delete(self._max_bytes - num_bytes)
            if self._used + num_bytes > self._max_bytes and self._sweep is None:
                self._begin()  # all known files were used since, or deleted
                self._look_on()
                self._delete(self._max_bytes - num_bytes)
        return self._used + num_bytes <= self._max_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._new_bytes += num_bytes
        if self._used is not None:
            self._used += num_bytes

    def _look_on(self) -> None:
        """Continue the sweep, and begin one if it is due."""
        if self._sweep is None:
            is_due = self._clock.now() >= self._swept_s + SWEEP_S
            if self._used is None or is_due or self._new_bytes > self._max_bytes // SLACK:
                self._begin()
        if self._sweep is not None and next(self._sweep, ENDED):
            self._sweep = None

    def _begin(self) -> None:
        self._new_bytes, self._swept_s = 0, self._clock.now()
        self._sweep = self._look()

    def _look(self) -> Iterator[bool]:
        """Sweep all files; yield when one call has done enough."""
        total = cost = 0
        oldest: list[tuple[int, int, str]] = []  # a heap, the youngest of them first
        for folder in _folders(self._top, 3):
            cost += FOLDER_COST
            for changed, size, path in self._files(folder):
                total, cost = total + size, cost + 1
                keep = heapq.heappush if len(oldest) < MAX_OLDEST else heapq.heappushpop
                keep(oldest, (-changed, size, path))
            if cost > FILES_PER_CALL:
                cost = 0
                yield not ENDED
        self._used = total + self._new_bytes  # some new bytes may count twice, until the next sweep
        self._oldest = deque(sorted((-changed, size, path) for changed, size, path in oldest))

    def _files(self, folder: str) -> Iterator[Old]:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(self._suffix):
                    with contextlib.suppress(FileNotFoundError):
                        facts = entry.stat(follow_symlinks=False)
                        yield facts.st_mtime_ns, facts.st_size, entry.path

    def _delete(self, target_bytes: int) -> None:
        """Delete the oldest files until at most `target_bytes` remain. Then delete a few more, for
        bytes that other processes write."""
        assert self._used is not None
        num_more, fewer_bytes = DELETED_PER_CALL, target_bytes - self._max_bytes // SLACK
        while self._oldest and (self._used > target_bytes or num_more and self._used > fewer_bytes):
            num_more -= self._used <= target_bytes
            changed, size, path = self._oldest.popleft()
            try:
                if os.stat(path, follow_symlinks=False).st_mtime_ns != changed:
                    continue  # used since
                os.unlink(path)
            except FileNotFoundError:
                pass  # deleted by another process
            except OSError:
                continue
            self._used -= size


def _folders(top: str, depth: int) -> Iterator[str]:
    """Yield all folders `depth` levels below `top`."""
    if depth == 0:
        yield top
        return
    with contextlib.suppress(OSError):
        with os.scandir(top) as entries:
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        for path in inner:
            yield from _folders(path, depth - 1)
