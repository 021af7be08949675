"""Pages of the CPU's memory: large ones, mapped files, and when the system hands them out. No
torch; `host_memory.py` makes tensors of them."""

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
ALIGNMENT = 64  # a vector of AVX-512, a line of the cache
# Linux has these:
MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros. The operating system hands out each page, in most cases a large one, when it is
    first written, so a KV pool costs neither time nor memory before it is used. They begin at a
    line of the cache or, if they are many, at a large page: numpy's own begin 16 bytes behind one,
    where every vector and every block of a pool would stand in one more line, or page."""
    alignment = ALIGNMENT if num_bytes < HUGE_PAGE else HUGE_PAGE
    memory = np.zeros(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes]


def huge_pages(num_bytes: int) -> mmap.mmap:
    """Map memory of its own, HUGE_PAGE more than asked for, so that it can begin at a multiple of
    that; it takes none before it is written."""
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(mapped)
    return mapped


def mapped_pages(file: int, num_bytes: int) -> mmap.mmap:
    """Map the first bytes of an opened file, which must be so long. Not to be written to: that ends
    the process.

    All processes share one copy, in large pages where the file system has them. The file stays
    open, and locked if it was, as long as something is in it. Raises OSError, ValueError.
    """
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"the file is shorter than {num_bytes} bytes")
    mapped = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _advise_huge_pages(mapped)
    return mapped


def _advise_huge_pages(mapped: mmap.mmap) -> None:
    if MADV_HUGEPAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(MADV_HUGEPAGE)


def forget(address: int, num_bytes: int) -> None:
    """Give back whole pages of a mapped file, which no longer count as memory of this process;
    reading them again reads the file."""
    if MADV_DONTNEED is None:
        return
    start = aligned(address, mmap.PAGESIZE)
    length = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        _system().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_DONTNEED)


def populate(address: int, num_bytes: int) -> bool:
    """Have the system hand out all pages of this memory that it has not yet; what is written there
    stays as it is. False if it cannot do that. Lets other threads run."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = aligned(address + num_bytes, mmap.PAGESIZE)
    if not sys.platform.startswith("linux"):
        return False
    place, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
    return bool(_system().madvise(place, size, MADV_POPULATE_WRITE) == 0)


@functools.cache
def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def free_disk_bytes(directory: Path) -> int:
    """Count the bytes that this process may still write there. Raises OSError."""
    facts = os.statvfs(directory)
    return facts.f_bavail * facts.f_frsize
