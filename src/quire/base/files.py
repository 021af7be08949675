"""Durable writes of files, and the folder of the user's caches.

`os.write` may write a part of what it is given and report no error: so does a disk with room for
that part alone. Code that ignores the count then replaces a whole file with a cut one. A durable
write leaves the old contents or the new ones, even if the disk is full or the process is killed.
"""

import contextlib
import os
from pathlib import Path


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of the data at the descriptor's position. Raises OSError; then a part of the data
    may be in the file."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[os.write(fd, rest) :]


def replace_file(path: Path, data: bytes, temporary: Path, mode: int = 0o600) -> None:
    """Replace a file, which is on the disk when this returns.

    temporary: an unused path in the same directory. Raises OSError; then `path` has its old
    contents, or the new ones if only the directory could not be synced, and `temporary` is gone.
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
    """Have the disk hold the names in a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def user_cache(name: str) -> Path:
    """Return the directory of one of quire's caches; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "quire" / name
