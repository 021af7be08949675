"""Which operations a GPU has kernels for: `kernels_for` is what they ask before they take torch's
operations.

triton comes with CUDA builds of torch. Where it cannot be imported everything still works, slower,
and a warning says so once.
"""

import functools
import importlib
import logging
from types import ModuleType

import torch

logger = logging.getLogger("quire")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def kernels_for(tensor: torch.Tensor, name: str, any_dtype: bool = False) -> ModuleType | None:
    """The module `quire.ops.kernels.NAME`, if it can serve this tensor: on a GPU, and not in
    float64, which the kernels compute in float32. any_dtype: nothing is computed in its dtype."""
    is_served = is_on_gpu(tensor) and (any_dtype or tensor.dtype in DTYPES)
    if not is_served or not has_triton():
        return None
    return _load(name)


def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether tensors there are served by kernels that compute in this dtype."""
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
def _load(name: str) -> ModuleType:
    return importlib.import_module(f"quire.ops.kernels.{name}")
