"""Loader of the C++ core, `quire._core`. Without it, the torch path does the work.

The core's functions (native_types.py) take addresses and sizes; this module checks what is passed.
They release the interpreter's lock. A missing core is never an error: `core()` warns once and
returns None. This module does not import torch.
"""

import functools
import hashlib
import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from quire.ops.host.native_types import Core

if TYPE_CHECKING:
    import torch

INTERFACE_VERSION = 30

_HOW_TO_BUILD = (
    "Everything works, but slower on a CPU. Install a C++17 compiler (Debian and Ubuntu:"
    " apt install g++) and then quire again (`make install`, or `pip install -e .`)."
)


@functools.cache
def core() -> Core | None:
    """Return the compiled module. Return None, with a warning, if it is missing, has another
    version, or was built for CPUs with more instruction sets than this one has."""
    try:
        module = cast(Core, importlib.import_module("quire._core"))
    except ImportError as error:
        warnings.warn(f"The C++ core was not found ({error}). {_HOW_TO_BUILD}", stacklevel=2)
        return None
    if module.version() != INTERFACE_VERSION:
        warnings.warn(
            f"The C++ core has interface {module.version()}, this code needs {INTERFACE_VERSION}:"
            f" it was built from other sources. {_HOW_TO_BUILD}",
            stacklevel=2,
        )
        return None
    if not module.linear_variants():
        warnings.warn(f"The C++ core was built for another CPU. {_HOW_TO_BUILD}", stacklevel=2)
        return None
    return module


def chain_of(block_hash: object) -> Callable[[bytes, bytes, int], list[bytes]] | None:
    """Return the core's function for the digests of consecutive blocks: the SHA-256 of the digest
    before a block and of its bytes. Return None without a core, or for another hash function."""
    native = core()
    return native.chain_digests if native is not None and block_hash is hashlib.sha256 else None


def needed_core() -> Core:
    """Return the core, for callers that hold an object which only the core can have made."""
    module = core()
    assert module is not None, "this needs the C++ core"
    return module


def core_for(*tensors: "torch.Tensor") -> Core | None:
    """Return the core if all tensors [...] are on the CPU and the core exists, else None."""
    return core() if all(tensor.device.type == "cpu" for tensor in tensors) else None


def address(tensor: "torch.Tensor", dtype: "torch.dtype") -> int:
    """Return the address of a tensor's data [...]. It must be contiguous, of this dtype and on the
    CPU.

    The caller must hold the tensor until the core's function has returned.
    """
    assert tensor.dtype == dtype, f"needs {dtype}, got {tensor.dtype}"
    assert tensor.is_contiguous(), f"needs a contiguous tensor, got strides {tensor.stride()}"
    assert tensor.device.type == "cpu", f"needs a tensor on the CPU, got {tensor.device}"
    return tensor.data_ptr()
