"""Durable writes of files, and the folder of the user's caches.

`os.write` may write only a part of the data and report no error, for example on a full disk. Code
that ignores the count then replaces a whole file with a truncated one. A durable write leaves the
old or the new contents, even if the disk is full or the process is killed.
"""

import contextlib
import os
from pathlib import Path


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all data at the descriptor's position.

    Raises OSError; the file may then hold a part of the data."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]


def replace_file(path: Path, data: bytes, temporary: Path, mode: int = 0o600) -> None:
    """Replace a file durably: it is on the disk when this returns.

    temporary: an unused path in the same directory, removed on failure. Raises OSError. Then `path`
    has its old contents, or the new ones if only the sync of the directory failed.
    """
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Sync the names in a directory to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def user_cache(name: str) -> Path:
    """Return the directory of one of quire's caches, which may not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "quire" / name
