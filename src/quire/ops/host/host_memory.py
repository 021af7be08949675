"""Memory of the CPU as tensors: zeroed and only taken when it is used, or in large pages; and the
way from it to a device."""

import math

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.pages import HUGE_PAGE, aligned, forget, huge_pages, zeros

CHUNK_BYTES = 64 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, on a CPU those of `zeros`."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(zeros(size)).view(dtype).view(shape)


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
    whole = torch.frombuffer(huge_pages(num_bytes), dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]


def forget_pages(values: torch.Tensor) -> None:
    """Give back the whole pages of a mapped file in which these contiguous values lie."""
    if values.device.type == "cpu":
        forget(values.data_ptr(), values.nbytes)
