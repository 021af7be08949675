"""A store in a directory, which several engines may share: one file per block.

    DIRECTORY/quire-kv-1/FINGERPRINT/GROUP/DI/DIGEST.kv      hexadecimal; DI: its first two digits
    DIRECTORY/quire-kv-1/tmp/PROCESS-NUMBER.tmp              while it is written

A file gets its name by a rename when it is complete. It is not forced to the disk: the envelope's
checksum rejects files that a loss of power damaged. The least recently used files are deleted first
(`trim.py`); a use sets a file's modification time. Reads always continue. After a failed write,
nothing is written for a while.

`shm:NAME` is such a directory in the shared memory of this machine, in /dev/shm/quire-kv-USER-NAME.
Engines of one user share it by its name. It remains after they end, until the machine is restarted
or a user removes the directory.
"""

import contextlib
import errno
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from quire.base.clock import Clock, MonotonicClock
from quire.base.errors import ConfigError
from quire.engine.connectors.store import Buffer, split_key
from quire.engine.connectors.trim import Trimmer
from quire.engine.observability.log_throttle import ThrottledLog

logger = logging.getLogger("quire")

LAYOUT = "quire-kv-1"  # changes with the names; the envelope has a version of its own
SUFFIX, UNFINISHED = ".kv", ".tmp"
PAUSE_S = 30.0  # without storing, after it failed
OLD_S = 3600.0  # after this time, the writer of an unfinished file has ended
TOUCH_S = 2.0  # a file used again within this time is not marked again
MIN_FREE_SHARE, MIN_FREE_BYTES = 0.05, 1_000_000_000  # minimum free space; the smaller
SHARED_MEMORY = Path("/dev/shm")
STORE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
MAX_SHARE_OF_MEMORY = 4  # blocks may use a quarter of shared memory
NUM_PREFETCHED = 8  # files that the disk prefetches
MAX_VALUE_BYTES = 1 << 28  # of a value; a larger file is not ours
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # never waits for a pipe
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

T = TypeVar("T")
advise = getattr(os, "posix_fadvise", None)  # Linux has it


class DiskStore:
    """Store of blocks in files. max_bytes: limit of all files in this directory, from any process.

    Raises ConfigError if the directory cannot be created."""

    def __init__(self, directory: str | Path, max_bytes: int, clock: Clock | None = None) -> None:
        self.directory = Path(directory).expanduser()
        if max_bytes <= 0:
            raise ConfigError(f"max_bytes of a store must be positive, got {max_bytes}.")
        self._clock = clock or MonotonicClock()
        self._top = os.path.join(self.directory, LAYOUT)
        self._temporary = os.path.join(self._top, "tmp")
        self._log = ThrottledLog(self._clock, 0.0)  # the pause is limit enough
        self._resume_s: float | None = None  # when storing resumes; None unless it pauses
        self._num_written = 0
        self._buffer = bytearray()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the directory {str(self.directory)!r} for KV blocks cannot be created"
                f" ({error.strerror}); give another one."
            ) from error
        self._trimmer = Trimmer(self._top, SUFFIX, max_bytes, self._clock)
        self._remove_unfinished(self._clock.now())

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        is_file = os.path.isfile
        return [is_file(self._path(key)) for key in keys]

    def get(self, keys: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield the files' content, each read in one go. The disk prefetches the next files, so
        that it is never idle."""
        opened: list[int | None] = []
        try:
            for i in range(len(keys)):
                while len(opened) < min(len(keys), i + NUM_PREFETCHED):
                    opened.append(self._open(keys[len(opened)]))
                file, opened[i] = opened[i], None
                yield None if file is None else self._read(file)
        finally:
            for file in opened:
                if file is not None:
                    os.close(file)

    def put(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        now, resume_s = self._clock.now(), self._resume_s
        if resume_s is not None and now < resume_s:
            return False
        num_bytes = sum(memoryview(part).nbytes for part in parts)
        try:
            if resume_s is not None:
                self._make_directory()
            self._check_free(num_bytes)
            if now >= self._cleaned_s + OLD_S:
                self._remove_unfinished(now)
            if not self._trimmer.make_room(num_bytes):
                return False
            self._write(self._path(key), parts)
        except OSError as error:
            self._resume_s = now + PAUSE_S
            self._log.warn(
                "store",
                f"no KV blocks are stored in {self.directory} for {PAUSE_S:.0f} s:"
                f" {error.strerror or error}",
            )
            return False
        if resume_s is not None:
            logger.info("KV blocks are stored in %s again", self.directory)
        self._resume_s = None
        self._trimmer.add(num_bytes)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        """Delete the files of these keys. If some cannot be deleted, raise OSError after deleting
        all others."""
        errors: list[OSError] = []
        for key in keys:
            try:
                os.unlink(self._path(key))  # the trimmer's next sweep notices
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._buffer = bytearray()

    # ---- names -------------------------------------------------------------------------------

    def _path(self, key: bytes) -> str:
        fingerprint, group, digest = split_key(key)
        name = digest.hex()
        return f"{self._top}/{fingerprint.hex()}/{group}/{name[:2]}/{name}{SUFFIX}"

    def _make_directory(self) -> None:
        """Create our directory again, after it was removed. Its parent must exist: it may be a
        mount that was unmounted. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory, 0o700)

    # ---- reading -----------------------------------------------------------------------------

    def _open(self, key: bytes) -> int | None:
        try:
            file = os.open(self._path(key), READ)
        except OSError:
            return None
        if advise is not None:
            with contextlib.suppress(OSError):  # it is only a hint
                advise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def _read(self, file: int) -> memoryview | None:
        """Read a whole file into a buffer that the next call overwrites. None if it cannot be
        read."""
        try:
            facts = os.fstat(file)
            if facts.st_size > MAX_VALUE_BYTES:
                return None
            if len(self._buffer) < facts.st_size:
                self._buffer = bytearray(facts.st_size)
            view, done = memoryview(self._buffer)[: facts.st_size], 0
            while done < len(view) and (num := os.readv(file, [view[done:]])):
                done += num
            if time.time() - facts.st_mtime > TOUCH_S:
                with contextlib.suppress(OSError):  # owned by another user, or not writable
                    os.utime(file)
            return view[:done]
        except OSError:
            return None
        finally:
            os.close(file)

    # ---- writing -----------------------------------------------------------------------------

    def _check_free(self, num_bytes: int) -> None:
        """Raise OSError if this would use the disk's last bytes."""
        facts = os.statvfs(self.directory)
        free = facts.f_bavail * facts.f_frsize
        aligned_bytes = -(-num_bytes // facts.f_frsize) * facts.f_frsize
        min_free_bytes = min(MIN_FREE_SHARE * facts.f_blocks * facts.f_frsize, MIN_FREE_BYTES)
        if free - aligned_bytes < min_free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the disk has {free / 1e9:.2f} GB free, and must keep {min_free_bytes / 1e9:.2f}"
                " GB free",
            )

    def _write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file. Raises OSError; then no part of it is left."""
        self._num_written += 1
        name = f"{os.getpid()}-{id(self):x}-{self._num_written}{UNFINISHED}"
        temporary = os.path.join(self._temporary, name)
        file = _within(self._temporary, lambda: os.open(temporary, CREATE, 0o600))
        try:
            try:
                _write_all(file, parts)
            finally:
                os.close(file)
            _within(os.path.dirname(path), lambda: os.rename(temporary, path))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _remove_unfinished(self, now: float) -> None:
        """Delete the unfinished files of killed processes. now: by the store's clock."""
        self._cleaned_s = now
        before = time.time() - OLD_S
        try:
            with os.scandir(self._temporary) as entries:
                old = [e.path for e in entries if e.stat(follow_symlinks=False).st_mtime < before]
        except OSError:
            return
        for path in old:
            with contextlib.suppress(OSError):
                os.unlink(path)


def shared_memory_store(address: str, max_bytes: int) -> DiskStore:
    """Open the store of this name, limited to a quarter of the shared memory. Raises ConfigError if
    there is no such memory, or if other users can write to the directory."""
    if not STORE_NAME.fullmatch(address):
        raise ConfigError(
            f"shm:NAME takes a name of letters, digits, '-', '_' and '.', got {address!r}."
        )
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"shm:{address} needs {SHARED_MEMORY}, which only Linux has; use dir:PATH instead."
        )
    facts = os.statvfs(SHARED_MEMORY)
    limit_bytes = min(max_bytes, facts.f_blocks * facts.f_frsize // MAX_SHARE_OF_MEMORY)
    store = DiskStore(SHARED_MEMORY / f"quire-kv-{os.getuid()}-{address}", max(1, limit_bytes))
    found = store.directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{store.directory} is writable by other users, who could change cached blocks; use"
            " another name."
        )
    return store


def _within(folder: str, call: Callable[[], T]) -> T:
    """Return the result of a call. If a folder is missing, create it and call again. Raises
    OSError."""
    try:
        return call()
    except FileNotFoundError:
        os.makedirs(folder, 0o700, exist_ok=True)
        return call()


def _write_all(file: int, parts: Sequence[Buffer]) -> None:
    """Write all of the data. Raises OSError."""
    views = [view for part in parts if (view := memoryview(part).cast("B"))]
    while views:
        num = os.writev(file, views)
        while views and num >= len(views[0]):
            num -= len(views.pop(0))
        if views:
            views[0] = views[0][num:]
