"""CPU memory as tensors: zeros that occupy memory only once written, memory in large pages, and
copies to a device."""

import math

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.pages import HUGE_PAGE, aligned, forget, huge_pages, zeros

CHUNK_BYTES = 64 << 20


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros; on a CPU, its pages are allocated when they are first written."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(zeros(size)).view(dtype).view(shape)


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy values [...] to a device; a GPU's host does not wait. Do not change them afterwards.

    The pinned memory may be released at once. torch's copy notifies the host allocator of the
    stream that reads it: at::native::copy_kernel_cuda calls record_event for copies that do not
    block. When the tensor is freed, the allocator records an event there and reuses the memory only
    after it (CachingHostAllocatorImpl::free, process_events). After the first calls, memory of so
    few bytes comes from its free lists, without a call of cudaHostAlloc.
    """
    here = torch.from_numpy(values)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


class HugeMemory:
    """Allocator of memory in pages of 2 MiB, where the system has them; reading it misses the TLB
    less often. A chunk is freed with its last tensor."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised bytes [num_bytes], aligned to 64."""
        if num_bytes > len(self._chunk) - self._used:
            self._chunk = _huge_chunk(max(CHUNK_BYTES, aligned(num_bytes, HUGE_PAGE)))
            self._used = 0
        start = self._used
        self._used = min(len(self._chunk), aligned(start + num_bytes))
        return self._chunk[start : start + num_bytes]


def passing_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor whose memory returns to the system as soon as it is freed;
    malloc would hold some of it. For tensors of megabytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return _huge_chunk(num_bytes).view(dtype).view(shape)


def _huge_chunk(num_bytes: int) -> torch.Tensor:
    """Return bytes from a multiple of 2 MiB on, which occupy no memory before they are written."""
    whole = torch.frombuffer(huge_pages(num_bytes), dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]


def forget_pages(values: torch.Tensor) -> None:
    """Return to the system the whole pages within contiguous values [...], as `forget` does."""
    if values.device.type == "cpu":
        forget(values.data_ptr(), values.nbytes)
