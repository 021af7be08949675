"""Helpers that all kernels share: their class, dtypes, whether Triton interprets, and the launches
to compile."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.interpreter import InterpretedFunction

from quire.ops.kernels.prepared import PreparedLaunches

VERSION = str(triton.__version__)
INTERPRETED = bool(triton.knobs.runtime.interpret)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


# Environment variables: 1 to use code that no GPU has run yet.
OVERLAP = "QUIRE_OVERLAP_LAUNCHES"
MERGE_LAST = "QUIRE_MERGE_IN_ATTENTION"
STREAM_K = "QUIRE_STREAM_PRODUCTS"
ROTATE_WITHIN = "QUIRE_ROTATE_IN_ATTENTION"
PREPARED = "QUIRE_PREPARED_LAUNCHES"
SWITCHES = (OVERLAP, MERGE_LAST, STREAM_K, ROTATE_WITHIN, PREPARED)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel may begin before its predecessor has ended (programmatic dependent
    launch). It then waits before it reads what earlier kernels wrote, and before it writes. Off by
    default, because no GPU has run it yet."""
    if os.environ.get(OVERLAP) != "1" or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_option(is_on: bool) -> dict[str, bool]:
    """Return the launch option of a kernel that waits. Triton's interpreter has no such option."""
    return {"launch_pdl": True} if is_on else {}


@triton.jit
def wait_if(AHEAD: tl.constexpr):
    """Wait for the predecessor if the launch may overlap it, and let the next launch begin."""
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()


def merges_last() -> bool:
    """Return whether the program that arrives last merges the parts of attention (`arrives_last`).
    Off by default, because no GPU has run it yet."""
    return os.environ.get(MERGE_LAST) == "1"


def rotates_within() -> bool:
    """Return whether attention of decoding rows rotates their heads (`rotary_attention.py`). Off by
    default, because no GPU has run it yet."""
    return os.environ.get(ROTATE_WITHIN) == "1"


@triton.jit
def arrives_last(counter_ptr, num_programs):
    """Return whether this program is the last of `num_programs` to arrive at a counter, and reset
    the counter. The last program may read what the others stored before they arrived.

    The barrier orders the stores of all threads before the release of the counting thread. Memory
    that another program wrote must be read after the acquire. No program waits for another.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


_only_compiles = ContextVar("only_compiles", default=False)


@functools.cache
def prepares() -> bool:
    """Return whether launches look up their compiled kernel by a short key (`PreparedLaunches`).
    Off by default, because no GPU has run it yet."""
    return os.environ.get(PREPARED) == "1"


class Kernel(triton.JITFunction[Any]):
    """Function that the host launches. Within `compiling` a launch only compiles it."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._prepared = PreparedLaunches(self.params)

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        """See JITFunction."""
        warmup = warmup or _only_compiles.get()
        if warmup or not prepares() or not self._prepared.launch(args, grid, named):
            found = super().run(*args, grid=grid, warmup=warmup, **named)
            if not warmup and prepares():
                self._prepared.add(args, named, found)
            return found
        return None


class InterpretedKernel(InterpretedFunction[Any]):
    """The same by Triton's interpreter, which compiles nothing."""

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        """See InterpretedFunction."""
        if not _only_compiles.get():
            super().run(*args, grid=grid, warmup=warmup, **named)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a function that the host launches. options: of `triton.jit`."""
    made: Any = InterpretedKernel if INTERPRETED else Kernel
    return lambda function: made(function, **options)


@contextmanager
def compiling(executor: Executor) -> Iterator[None]:
    """Let this thread's launches compile their kernels on the executor's threads, without running
    them. At the end each kernel is compiled, once, and Triton finds it at the next launch. A kernel
    that cannot be compiled is left to its launch."""
    token = _only_compiles.set(True)
    try:
        with triton.AsyncCompileMode(executor, ignore_errors=True):
            yield
    finally:
        _only_compiles.reset(token)


@dataclass(frozen=True)
class Config:
    """Launch of a kernel in production, which tests compile ahead of time.

    signature: Triton types of the arguments by name ("*bf16", "i32", "fp32"). constants: constexpr
    arguments. divisible: arguments that are multiples of 16, in addition to pointers. needs_wgmma:
    whether its dots must compile to Hopper's matrix instruction.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    divisible: tuple[str, ...] = ()
    needs_wgmma: bool = field(default=False)
    name: str = ""


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of dot operands: float32 under the interpreter, whose bfloat16 is wrong."""
    return tl.float32 if INTERPRETED else DTYPES[dtype]


def stages_that_fit(max_stages: int, stage_bytes: int, device: torch.device) -> int:
    """Return the number of pipeline stages, from 1 to `max_stages`, whose buffers fit into shared
    memory. Results do not depend on it."""
    if device.type != "cuda":
        return max_stages
    space = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return int(max(1, min(max_stages, space // stage_bytes)))


def next_power_of_2(number: int) -> int:
    """Return the next power of 2, at least 1. (Triton's function of this name returns 0 for 0.)"""
    return 1 << max(0, number - 1).bit_length()
