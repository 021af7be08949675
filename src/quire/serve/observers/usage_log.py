"""The log of `--usage-log FILE`: one JSON object per line, one line per ended request.

A thread writes the lines, so a slow disk delays no request. All API processes append to the same
file, each line with one call, which the kernel keeps whole. The file is reopened when its name
refers to another file or to none, so a log rotation needs no signal.
"""

import logging
import os
import threading
from collections import deque
from pathlib import Path

from quire.base.errors import ConfigError

logger = logging.getLogger("quire")

MAX_LINES = 100_000  # lines that may wait for the disk, about 25 MB
AGAIN_S = 1.0  # pause before a retry, such as when the disk is full
CLOSE_S = 5.0


def check_usage_log(path: str | None) -> None:
    """Raise ConfigError if the file cannot be opened for appending."""
    if path is not None:
        os.close(_opened(Path(path)))


class UsageLog:
    """Writer that appends lines to a file in order of arrival. max_lines: lines that may wait.
    Lines beyond that are lost, and the log reports their number."""

    def __init__(self, path: Path, max_lines: int = MAX_LINES) -> None:
        """Open or create the file, and start the writer's thread. Raise ConfigError if the file
        cannot be opened."""
        self._path = path
        self._max_lines = max_lines
        self._fd = _opened(path)
        self._lines: deque[bytes] = deque()
        self._num_lost = 0
        self._has_partial_line = False  # whether the file ends with a partial line
        self._is_failing = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Queue a line, given without its line end. Never waits for the disk."""
        with self._changed:
            if len(self._lines) >= self._max_lines:
                self._num_lost += 1
                return
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Write the waiting lines within 5 s. If writes are failing, drop them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if left := len(self._lines) + self._num_lost:
            logger.error("%s: %d lines of usage could not be written", self._path, left)

    def _run(self) -> None:
        try:
            self._write_lines()
        finally:
            os.close(self._fd)

    def _write_lines(self) -> None:
        """Write lines until closed. A line stays in the queue until it is written."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    return
                line = self._lines[0]
            try:
                self._write(line + b"\n")
            except OSError as error:
                self._log_failure(error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, AGAIN_S):
                        return
                continue
            if self._is_failing:
                lost, self._num_lost = self._num_lost, 0
                logger.error("%s can be written again; %d lines were lost", self._path, lost)
                self._is_failing = False
            with self._changed:
                self._lines.popleft()

    def _write(self, line: bytes) -> None:
        """Write a line. After a torn line (the disk was full), begin on a new line."""
        self._follow()
        data = b"\n" + line if self._has_partial_line else line
        written = os.write(self._fd, data)
        if written < len(data):
            self._has_partial_line = True
            raise OSError(f"{written} of {len(data)} bytes were written")
        self._has_partial_line = False

    def _follow(self) -> None:
        """Reopen the file if it was renamed or removed."""
        opened = os.fstat(self._fd)
        try:
            now = self._path.stat()
        except FileNotFoundError:
            now = None
        if now is None or (now.st_dev, now.st_ino) != (opened.st_dev, opened.st_ino):
            try:
                fd = _opened(self._path)
            except ConfigError as error:
                raise OSError(str(error)) from error
            os.close(self._fd)
            self._fd, self._has_partial_line = fd, False

    def _log_failure(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            reason = error.strerror or error
            logger.error("%s cannot be written (%s); trying again", self._path, reason)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise ConfigError(
            f"usage_log={str(path)!r} cannot be opened ({error.strerror}); give a file in a"
            " directory that exists and that this user may write."
        ) from error
