"""Shared code of the micro-benchmarks: timing, and the machine's measured limit."""

import time
from collections.abc import Callable

import torch


def best_time(function: Callable[[], object], min_repeats: int = 5, min_s: float = 0.5) -> float:
    """Return the seconds of the fastest of several calls: disturbances only make a call slower."""
    function()
    times: list[float] = []
    while len(times) < min_repeats or sum(times) < min_s:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def copy_bandwidth(size_bytes: int = 256 << 20) -> float:
    """Return the bytes per second, read and written together, of copying memory that fits in no
    cache."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    destination = torch.ones_like(source)
    return 2 * size_bytes / best_time(lambda: destination.copy_(source))
