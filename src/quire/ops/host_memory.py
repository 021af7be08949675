"""Memory of the CPU: zeroed and only taken when it is used, in large pages, or a mapped file; and
the way from it to a device."""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

HUGE_PAGE = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64  # a vector of AVX-512, a line of the cache
# Linux has these:
MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the operating system hands out each page, in most cases a large one, when it
    is first written, so a KV pool costs neither time nor memory before it is used. They begin at a
    line of the cache or, if they are many, at a large page: numpy's own begin 16 bytes behind one,
    where every vector and every block of a pool would stand in one more line, or page."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    alignment = ALIGNMENT if size < HUGE_PAGE else HUGE_PAGE
    memory = torch.from_numpy(np.zeros(size + alignment, np.uint8))
    start = -memory.data_ptr() % alignment
    return memory[start : start + size].view(dtype).view(shape)


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The values on a device; a GPU's host does not wait for them. They must not be changed
    afterwards.

    The pinned memory may be let go of at once: torch's copy tells the host allocator which stream
    reads it (at::native::copy_kernel_cuda calls record_event for copies that do not block), and
    when the tensor dies the allocator records an event there and hands the memory out again only
    after it (CachingHostAllocatorImpl::free, process_events). Memory of so few bytes comes from its
    free lists after the first times, without a call of cudaHostAlloc.
    """
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


class HugeMemory:
    """Hands out memory of pages of 2 MiB, where the system has them: reading it misses the
    processor's page tables less often. A chunk is given back with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes without values, aligned to 64."""
        if num_bytes > len(self._chunk) - self._used:
            self._chunk = _huge_chunk(max(CHUNK_BYTES, aligned(num_bytes, HUGE_PAGE)))
            self._used = 0
        start = self._used
        self._used = min(len(self._chunk), aligned(start + num_bytes))
        return self._chunk[start : start + num_bytes]


def passing_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory without values that the system has back as soon as the tensor is gone; malloc would
    keep some of it. For tensors of megabytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _huge_chunk(num_bytes).view(dtype).view(shape)


def _huge_chunk(num_bytes: int) -> torch.Tensor:
    """Begins at a multiple of 2 MiB; takes no memory before it is written."""
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise_huge_pages(mapped)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]


def _advise_huge_pages(mapped: mmap.mmap) -> None:
    if MADV_HUGEPAGE is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(MADV_HUGEPAGE)


def mapped_file(file: int, num_bytes: int) -> torch.Tensor:
    """The first bytes of an opened file, which must be so long. Not to be written to: that ends
    the process.

    All processes share one copy, in large pages where the file system has them. The file stays
    open, and locked if it was, as long as a tensor is in it. Raises OSError, ValueError.
    """
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"the file is shorter than {num_bytes} bytes")
    mapped = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _advise_huge_pages(mapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it cannot be written to
        return torch.frombuffer(mapped, dtype=torch.uint8)


def forget_pages(values: torch.Tensor) -> None:
    """Whole pages of a mapped file in which these contiguous values lie no longer count as memory
    of this process; reading them again reads the file."""
    if MADV_DONTNEED is None or values.device.type != "cpu":
        return
    start = aligned(values.data_ptr(), mmap.PAGESIZE)
    length = (values.data_ptr() + values.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
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
