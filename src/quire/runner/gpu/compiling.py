"""Compile kernels before they are launched, in parallel.

Work is recorded as a graph that is then dropped, so that none of it runs. Its launches only compile
their kernels, each once, on several threads. Most of a compilation is outside of Python.
"""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.runner.device import Device
from quire.runner.gpu.pieces import no_collection

logger = logging.getLogger("quire")

MAX_THREADS = 16


def compile_all(device: Device, works: Iterable[Callable[[], object]]) -> None:
    """Compile all that these works launch. Work that fails is left to its launch."""
    from quire.ops.kernels.launch import compiling  # imports Triton

    with (
        ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as executor,
        compiling(executor),
    ):
        for work in works:
            try:
                device.run(_dropped(device, work)).wait()
            except Exception:
                logger.debug("the kernels of a step were not compiled ahead", exc_info=True)


def _dropped(device: Device, work: Callable[[], object]) -> Callable[[], list[torch.Tensor]]:
    """Return work that records other work and drops the recording."""

    def record() -> list[torch.Tensor]:
        with no_collection():
            graph = device.begin_capture()
            try:
                work()
            finally:
                device.end_capture(graph)
        return []

    return record
