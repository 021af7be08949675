"""Pages of CPU memory: large pages, mapped files, and early allocation. This module does not import
torch; `host_memory.py` makes tensors."""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # size of an AVX-512 vector and of a cache line
# Only Linux has these:
MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """Round a number of bytes up to a multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros, uint8 [num_bytes]. The system allocates each page, usually a large one, when it
    is first written. So a KV pool costs neither time nor memory before use. The array begins at a
    cache line or, if it is large, at a large page. numpy's own arrays begin 16 bytes after one, so
    each vector and each block of a pool would touch one more line or page."""
    alignment = ALIGNMENT if num_bytes < HUGE_PAGE else HUGE_PAGE
    memory = np.zeros(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes]


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Map private memory, HUGE_PAGE more than requested, so that it can begin at a multiple of
    HUGE_PAGE; it occupies no memory before it is written."""
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(mapped)
    return mapped


def mapped_pages(file: int, num_bytes: int) -> mmap.mmap:
    """Map the first bytes of an open file, which must have that length. Writing to them ends the
    process.

    All processes share one copy, in large pages if the file system has them. The file stays open,
    and locked if it was locked, while its mapping is in use. Raises OSError, ValueError.
    """
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"the file is shorter than {num_bytes} bytes")
    mapped = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _advise_huge_pages(mapped)
    return mapped


def _advise_huge_pages(mapped: mmap.mmap) -> None:
    if MADV_HUGEPAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without large pages
            mapped.madvise(MADV_HUGEPAGE)


def forget(address: int, num_bytes: int) -> None:
    """Return whole pages to the system, so they no longer count as this process's memory. Pages of
    a mapped file are read from it again; other pages then hold zeros."""
    if MADV_DONTNEED is None:
        return
    start = aligned(address, mmap.PAGESIZE)
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _system().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


def populate(address: int, num_bytes: int) -> bool:
    """Have the system allocate all pages of this memory now; contents stay unchanged. Return False
    if that is impossible. Releases Python's lock."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = aligned(address + num_bytes, mmap.PAGESIZE)
    if not sys.platform.startswith("linux"):
        return False
    start_address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
    return bool(_system().madvise(start_address, size, MADV_POPULATE_WRITE) == 0)


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def free_disk_bytes(directory: Path) -> int:
    """Return the bytes that this process may still write in a directory. Raises OSError."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize
