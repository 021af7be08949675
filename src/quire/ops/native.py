"""The C++ core, `quire._core`: loaded if it was built, else the torch path does the work.

Its functions take addresses and sizes; what is passed is checked here. They release the
interpreter's lock. A missing core is never an error: `core()` warns once and returns None.
"""

import ctypes
import functools
import importlib
import sys
import warnings
from types import ModuleType

import torch

INTERFACE_VERSION = 4

_HOW_TO_BUILD = (
    "Everything works, but slower on a CPU. Install a C++17 compiler (Debian and Ubuntu:"
    " apt install g++) and then quire again (`make install`, or `pip install -e .`)."
)


@functools.cache
def core() -> ModuleType | None:
    """The compiled module, or None if it is missing or of another version (with one warning)."""
    try:
        module = importlib.import_module("quire._core")
    except ImportError as error:
        warnings.warn(f"The C++ core is not there ({error}). {_HOW_TO_BUILD}", stacklevel=2)
        return None
    if module.version() != INTERFACE_VERSION:
        warnings.warn(
            f"The C++ core has interface {module.version()}, this code needs {INTERFACE_VERSION}:"
            f" it was built from other sources. {_HOW_TO_BUILD}",
            stacklevel=2,
        )
        return None
    module.share_threads(_gomp_parallel())
    return module


def _gomp_parallel() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if it uses another.

    With it the core works on the threads of torch's own operations. With threads of its own it
    would wait for cores on which torch's idle threads spin.
    """
    if sys.platform != "linux":
        return 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = {line.split()[-1] for line in maps if "/libgomp" in line}
    if len(loaded) != 1:
        return 0
    library = ctypes.CDLL(loaded.pop())
    return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


def core_for(*tensors: torch.Tensor) -> ModuleType | None:
    """The core, if it can work on these tensors: all of them on the CPU."""
    return core() if all(tensor.device.type == "cpu" for tensor in tensors) else None


def address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Where the tensor's data begins. It must be contiguous, of this dtype and on the CPU.

    The caller keeps the tensor alive until the core's function has returned.
    """
    assert tensor.dtype == dtype, f"needs {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous(), f"needs a contiguous tensor, got strides {tensor.stride()}"
    assert tensor.device.type == "cpu", f"needs a tensor on the CPU, got {tensor.device}"
    return tensor.data_ptr()


def num_threads() -> int:
    """Threads that one operation may use: as many as torch's own operations."""
    return torch.get_num_threads()
