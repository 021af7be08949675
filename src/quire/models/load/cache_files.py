"""Write, read and remove the files of the weight cache. No torch.

    "QUIREWTS" | start of data u64 | bytes of data u64 | bytes of index u64 | SHA-256 of index
    index: JSON {key, ...}
    data, from a multiple of 4 KiB on

A file gets its name when it is complete. A process that maps a file holds a lock on it. All files
together use a limited share of the disk; the least recently used files are removed first.

The cache identifies a checkpoint's file without reading all of it, by name, size, modification time
and

    small files   a digest of the whole file
    large files   a digest of the beginning (a safetensors file's whole header), of PAGES pages
                  spread over the file, and of one page within each tensor, up to MAX_TENSORS

The cache misses a change of a large file that avoids these pages and resets the modification time.
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
PAGE_BYTES = 4096
MAX_INDEX_BYTES = 1 << 26
WEIGHTS, STARTS, UNFINISHED = ".weights", ".start", ".tmp"  # suffixes of file names
WRITTEN_AT_ONCE = 64 << 20  # large writes give the page cache large pages

MAX_BYTES = 50_000_000_000
SHARE_OF_DISK = 0.2  # of the space that would be free without the cache
MIN_BYTES = 64_000_000  # minimum in the default directory; packing less is fast
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)  # raised for a bad file


@dataclass(frozen=True)
class WeightCache:
    """A directory of packed weights. min_bytes: minimum size of the weights of a cached model.
    caches_dummies: whether random weights are cached, too."""

    directory: Path
    min_bytes: int = 0
    caches_dummies: bool = True


def weight_cache(setting: str) -> WeightCache | None:
    """Return the cache of a setting: `off`, `auto` (the user's cache directory) or a directory."""
    if setting == "off":
        return None
    if setting == "auto":
        return WeightCache(user_cache("weights"), MIN_BYTES, caches_dummies=False)
    return WeightCache(Path(setting).expanduser())


@dataclass(frozen=True)
class Contents:
    """Contents of a cache file: its index, and the read-only mapping, whose data begins at
    `start`."""

    index: dict[str, Any]
    mapped: mmap.mmap
    start: int


@contextlib.contextmanager
def in_use(path: Path) -> Iterator[int]:
    """Open a file and lock it against removal as long as it is mapped. On exit, record that it was
    used now. Raises OSError."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield file.fileno()
        with contextlib.suppress(OSError):  # another user's file; the time only orders removals
            os.utime(file.fileno())


def read_contents(file: int, key: str) -> Contents:
    """Read the index of an opened file and map its data. Raises one of UNUSABLE for a file that
    `write_contents` did not write for this key."""
    magic, start, num_bytes, index_bytes, digest = HEADER.unpack(_read_bytes(file, 0, HEADER.size))
    if magic != MAGIC or index_bytes > MAX_INDEX_BYTES or start % PAGE_BYTES:
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
    path: Path, index: dict[str, Any], pieces: Sequence[tuple[int, Bytes]], contents_name: str
) -> bool:
    """Write a file if there is room, and return whether it exists now. Errors are logged.

    index: includes the key. pieces: (offset in the data, bytes), in order of offset; gaps are zero.
    contents_name: name of the contents, for the log.
    """
    num_bytes = max((offset + len(piece) for offset, piece in pieces), default=0)
    head, start = _head(index, num_bytes)
    total = start + num_bytes
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not make_room(path.parent, total, path):
            logger.info(
                "%s: not cached, because %.1f GB exceed the limit of the cache",
                contents_name,
                total / 1e9,
            )
            return False
        file, name = tempfile.mkstemp(UNFINISHED, f"{path.stem}-", path.parent)
        temporary = Path(name)
        with os.fdopen(file, "wb", buffering=0) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            writer = _Writer(file, total)
            writer.put(0, head)
            for offset, piece in pieces or [(0, head[:0])]:  # without data, pad to its start
                writer.put(start + offset, piece)
            writer.flush()
            os.fsync(file)
            temporary.rename(path)
    except OSError as error:
        logger.warning("%s: not cached for the next start: %s", contents_name, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return False
    return True


def make_room(directory: Path, needed: int, replaced: Path) -> bool:
    """Remove the least recently used files until `needed` bytes fit; return whether they do. Files
    in use stay. replaced: a file to be rewritten, which does not count. Raises OSError."""
    files = []
    for path in directory.iterdir():
        if path.suffix == UNFINISHED:
            _remove_unused(path)
        elif path.suffix in (WEIGHTS, STARTS) and path != replaced:
            with contextlib.suppress(FileNotFoundError):
                files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    used = sum(size for _, size, _ in files)
    limit = min(MAX_BYTES, SHARE_OF_DISK * (free_disk_bytes(directory) + used))
    if needed > limit:
        return False
    for _, size, path in sorted(files):
        if used + needed > limit and _remove_unused(path):
            used -= size
    return used + needed <= limit


def _remove_unused(path: Path) -> bool:
    """Remove a file unless another process maps or writes it and so holds a lock. Return whether
    the file no longer exists."""
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
    """Return the header with the index, and the offset of the data."""
    text = json.dumps(index).encode()
    start = aligned(HEADER.size + len(text), PAGE_BYTES)
    digest = hashlib.sha256(text).digest()
    header = HEADER.pack(MAGIC, start, num_bytes, len(text), digest)
    return np.frombuffer(header + text, np.uint8), start


def _read_bytes(file: int, offset: int, num_bytes: int) -> bytes:
    found = os.pread(file, num_bytes, offset)
    if len(found) < num_bytes:
        raise ValueError("it is damaged (it ends too early)")
    return found


class _Writer:
    """Writer of pieces in order of offset, with large writes; gaps between pieces are zero."""

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


WHOLE_BYTES = 64 << 20
MIN_START_BYTES, MAX_START_BYTES = 1 << 24, 1 << 27  # a safetensors header has at most 100 MB
PAGES, MAX_TENSORS = 1024, 4096


def file_identity(path: Path) -> list[Any]:
    """Return name, size, modification time in ns, and digest of a file, as the module describes.
    Raises OSError."""
    with path.open("rb") as file:
        facts, digest = os.fstat(file.fileno()), hashlib.sha256()
        if facts.st_size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            ranges = _ranges(path)
            header_bytes = min((start for start, _ in ranges), default=0)
            digest.update(file.read(min(max(header_bytes, MIN_START_BYTES), MAX_START_BYTES)))
            for start in _page_offsets(ranges, facts.st_size):
                digest.update(os.pread(file.fileno(), PAGE_BYTES, start))
    return [path.name, facts.st_size, facts.st_mtime_ns, digest.hexdigest()]


def _page_offsets(ranges: Sequence[tuple[int, int]], size: int) -> Iterable[int]:
    """List the offsets of the pages of a large file that its digest covers, in order."""
    last = size - PAGE_BYTES
    spread = {last * i // (PAGES - 1) for i in range(PAGES)}
    middles = {(start + end) // 2 for start, end in ranges[:MAX_TENSORS]}
    return sorted(spread | {min(max(0, middle), last) for middle in middles})


def _ranges(path: Path) -> list[tuple[int, int]]:
    """List the first byte of each tensor and the byte after its last; empty for other formats."""
    try:
        if is_gguf(path):
            places = GGUFFile(path, is_whole=False).tensors.values()
            return [(place.start, place.start + place.num_bytes) for place in places]
        return sorted(tensor_ranges(path).values())
    except ModelError:
        return []
