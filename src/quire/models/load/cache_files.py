"""Files of the weight cache: how they are laid out, made, read and removed. No torch.

    "QUIREWTS" | start of data u64 | bytes of data u64 | bytes of index u64 | SHA-256 of index
    index: JSON {key, ...}
    data, from a multiple of 4 KiB on

A file appears under its name when it is complete. A process that maps one holds a lock on it. All
files together take a limited part of the disk; the least recently used ones are removed first.

A checkpoint's file is identified without reading all of it, by name, size, time of change, and

    small files   a digest of everything
    large ones    a digest of the beginning (a safetensors file's whole header), of PAGES pages
                  spread over the file, and of one page within each tensor, up to MAX_TENSORS

A large file that is changed in place, outside these pages, with its time set back, is not noticed.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.errors import ModelError
from quire.base.files import user_cache
from quire.models.checkpoint.files import tensor_ranges
from quire.ops.host.pages import aligned, free_disk_bytes, mapped_pages
from quire.spec.gguf.container import GGUFFile, is_gguf

logger = logging.getLogger("quire")

Bytes = npt.NDArray[np.uint8]

MAGIC = b"QUIREWTS"
HEADER = struct.Struct("<8sQQQ32s")
PAGE = 4096
MAX_INDEX_BYTES = 1 << 26
WEIGHTS, STARTS, UNFINISHED = ".weights", ".start", ".tmp"  # endings of names
WRITTEN_AT_ONCE = 64 << 20  # large writes give the page cache large pages

MOST_BYTES = 50_000_000_000
SHARE_OF_DISK = 0.2  # of what would be free without the cache
LEAST_BYTES = 64_000_000  # of weights in the default directory; less is packed in no time
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what a bad file raises


@dataclass(frozen=True)
class WeightCache:
    """least_bytes: weights of smaller models are not kept. keeps_dummies: random weights are kept,
    too."""

    directory: Path
    least_bytes: int = 0
    keeps_dummies: bool = True


def weight_cache(setting: str) -> WeightCache | None:
    """Return what the setting names: `off`, `auto` (the user's cache directory), or a directory."""
    if setting == "off":
        return None
    if setting == "auto":
        return WeightCache(user_cache("weights"), LEAST_BYTES, keeps_dummies=False)
    return WeightCache(Path(setting).expanduser())


@dataclass(frozen=True)
class Contents:
    """A file that was read: its index, and its data, mapped from `start` on, not to be written
    to."""

    index: dict[str, Any]
    mapped: mmap.mmap
    start: int


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[int]:
    """Open a file, which nobody removes as long as its mapping is there; it was used now. Raises
    OSError."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield file.fileno()
        with contextlib.suppress(OSError):  # not ours; it only says what was used last
            os.utime(file.fileno())


def read_contents(file: int, key: str) -> Contents:
    """Read an opened file. Raises one of UNUSABLE for one that is not what `write_contents`
    makes for this key."""
    magic, start, num_bytes, index_bytes, digest = HEADER.unpack(_read_bytes(file, 0, HEADER.size))
    if magic != MAGIC or index_bytes > MAX_INDEX_BYTES or start % PAGE:
        raise ValueError("it is damaged (its header)")
    text = _read_bytes(file, HEADER.size, index_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("it is damaged (its index)")
    index = json.loads(text)
    if index["key"] != key:
        raise ValueError("it belongs to another model")
    if os.fstat(file).st_size != start + num_bytes or start < HEADER.size + index_bytes:
        raise ValueError("it is damaged (its size)")
    return Contents(index, mapped_pages(file, start + num_bytes), start)


def write_contents(
    path: Path, index: dict[str, Any], pieces: Sequence[tuple[int, Bytes]], what: str
) -> bool:
    """Write a file, if there is room; whether it is there now. What goes wrong is logged.

    index: with its key. pieces: data, and where each begins; what lies between is zero. what: is
    kept, for the log.
    """
    num_bytes = max((offset + len(piece) for offset, piece in pieces), default=0)
    head, start = _head(index, num_bytes)
    total = start + num_bytes
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not make_room(path.parent, total, path):
            logger.info(
                "%s: not cached, because %.1f GB exceed the limit of the cache", what, total / 1e9
            )
            return False
        file, name = tempfile.mkstemp(UNFINISHED, f"{path.stem}-", path.parent)
        temporary = Path(name)
        with os.fdopen(file, "wb", buffering=0) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            writer = _Writer(file, total)
            writer.put(0, head)
            for offset, piece in pieces or [(0, head[:0])]:  # also of no data there is a beginning
                writer.put(start + offset, piece)
            writer.flush()
            os.fsync(file)
            temporary.rename(path)
    except OSError as error:
        logger.warning("%s: not cached for the next start: %s", what, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return False
    return True


def make_room(directory: Path, needed: int, replaced: Path) -> bool:
    """Remove what was used longest ago until so many bytes fit; what is in use stays. Whether they
    do. replaced: a file that does not count, because it is written again. Raises OSError."""
    files = []
    for path in directory.iterdir():
        if path.suffix == UNFINISHED:
            _remove_unused(path)
        elif path.suffix in (WEIGHTS, STARTS) and path != replaced:
            with contextlib.suppress(FileNotFoundError):
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    used = sum(size for _, size, _ in files)
    limit = min(MOST_BYTES, SHARE_OF_DISK * (free_disk_bytes(directory) + used))
    if needed > limit:
        return False
    for _, size, path in sorted(files):
        if used + needed > limit and _remove_unused(path):
            used -= size
    return used + needed <= limit


def _remove_unused(path: Path) -> bool:
    """Remove a file unless another process, which maps or writes it, locks it; tell if it is
    gone."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _head(index: dict[str, Any], num_bytes: int) -> tuple[Bytes, int]:
    """Header and index, and where the data begins."""
    text = json.dumps(index).encode()
    start = aligned(HEADER.size + len(text), PAGE)
    digest = hashlib.sha256(text).digest()
    header = HEADER.pack(MAGIC, start, num_bytes, len(text), digest)
    return np.frombuffer(header + text, np.uint8), start


def _read_bytes(file: int, offset: int, num_bytes: int) -> bytes:
    found = os.pread(file, num_bytes, offset)
    if len(found) < num_bytes:
        raise ValueError("it is damaged (it ends too early)")
    return found


class _Writer:
    """Writes pieces in the order of their places, in large parts; what lies between is zero."""

    def __init__(self, file: int, total: int) -> None:
        self._file = file
        self._part = np.zeros(min(total, WRITTEN_AT_ONCE), np.uint8)
        self._start = self._used = 0

    def put(self, offset: int, piece: Bytes) -> None:
        self._used = offset - self._start
        while len(piece):
            room = len(self._part) - self._used
            if room <= 0:
                self._write(len(self._part))
                continue
            now, piece = piece[:room], piece[room:]
            self._part[self._used : self._used + len(now)] = now
            self._used += len(now)

    def flush(self) -> None:
        self._write(self._used)

    def _write(self, num_bytes: int) -> None:
        view = memoryview(self._part.data)[:num_bytes]
        while len(view):
            view = view[os.write(self._file, view) :]
        self._part[:] = 0
        self._start, self._used = self._start + num_bytes, self._used - num_bytes


PAGE_BYTES = 4096
WHOLE_BYTES = 64 << 20
START_BYTES = 1 << 24
PAGES, MAX_TENSORS = 1024, 4096


def file_identity(path: Path) -> list[Any]:
    """Name, size, time of change in ns, and a digest of contents, as the module says. Raises
    OSError."""
    with path.open("rb") as file:
        facts, digest = os.fstat(file.fileno()), hashlib.sha256()
        if facts.st_size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            digest.update(file.read(START_BYTES))
            for start in _places(path, facts.st_size):
                digest.update(os.pread(file.fileno(), PAGE_BYTES, start))
    return [path.name, facts.st_size, facts.st_mtime_ns, digest.hexdigest()]


def _places(path: Path, size: int) -> Iterable[int]:
    """List where a large file is looked at, in order."""
    last = size - PAGE_BYTES
    spread = {last * i // (PAGES - 1) for i in range(PAGES)}
    middles = {(start + end) // 2 for start, end in _ranges(path)[:MAX_TENSORS]}
    return sorted(spread | {min(max(0, middle), last) for middle in middles})


def _ranges(path: Path) -> list[tuple[int, int]]:
    """List where each tensor begins and ends; nothing of a file that is neither format."""
    try:
        if is_gguf(path):
            places = GGUFFile(path).tensors.values()
            return [(place.start, place.start + place.num_bytes) for place in places]
        return sorted(tensor_ranges(path).values())
    except ModelError:
        return []
