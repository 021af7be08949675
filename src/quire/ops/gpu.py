"""Choice of GPU kernels: operations call `kernels_for` before they fall back to torch.

triton comes with CUDA builds of torch. If it cannot be imported, torch's slower operations are
used, and a warning is logged once.
"""

import functools
import importlib
import logging
from dataclasses import dataclass
from types import ModuleType

import torch

logger = logging.getLogger("quire")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GPU:
    """Properties of a GPU that launches depend on. capability: its compute capability.
    shared_bytes: shared memory that a thread block may use."""

    capability: tuple[int, int]
    num_processors: int
    shared_bytes: int


def gpu_of(device: torch.device) -> GPU | None:
    """Return the properties of a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    shared_bytes = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return GPU((found.major, found.minor), found.multi_processor_count, shared_bytes)


def kernels_for(tensor: torch.Tensor, name: str, any_dtype: bool = False) -> ModuleType | None:
    """Return the module `quire.ops.kernels.NAME` if its kernels can serve a tensor [...], else
    None. They serve tensors on a GPU, but not in float64, because they compute in float32.
    any_dtype: accept every dtype, for kernels that do not compute in the tensor's dtype."""
    is_served = is_on_gpu(tensor) and (any_dtype or tensor.dtype in DTYPES)
    if not is_served or not has_triton():
        return None
    return load_kernels(name)


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device is a GPU with kernels that compute in this dtype."""
    return is_gpu(device) and dtype in DTYPES and has_triton()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return is_gpu(tensor.device)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def has_triton() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.warning("no kernels for the GPU, torch's operations are used: %s", error)
        return False
    return True


@functools.cache
def load_kernels(name: str) -> ModuleType:
    """Return the module `quire.ops.kernels.NAME`, which imports Triton."""
    return importlib.import_module(f"quire.ops.kernels.{name}")
