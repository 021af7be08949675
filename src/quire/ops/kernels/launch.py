"""Helpers that all kernels share: their class, dtypes, whether Triton interprets, and the launches
to compile."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import Parameter
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime._async_compile import FutureKernel
from triton.runtime.interpreter import InterpretedFunction

from quire.ops import gpu

VERSION = str(triton.__version__)
INTERPRETED = bool(triton.knobs.runtime.interpret)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

LIMIT = 1 << 31  # of integers that Triton passes with 32 bits
MASK = 15  # Triton specialises for addresses and integers that are multiples of 16
MAX_INTEGERS = 4096  # that the launches of a kernel remember
TENSORS = torch.Tensor, Parameter
Key = tuple[Any, ...]

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
    found = gpu.gpu_of(device)
    return os.environ.get(OVERLAP) == "1" and found is not None and found.capability >= (9, 0)


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


class Prepared(NamedTuple):
    """A compiled kernel. launch: the call into Triton. facts: its arguments after the stream.
    constants: its last arguments, which the caller did not give by position."""

    launch: Any
    facts: tuple[Any, ...]
    constants: tuple[Any, ...]


class Integers(dict[int, int]):
    """Specialisation of integers, as a number. Triton derives it from the width, the remainder
    modulo 16, and whether the integer is 1. MAX_INTEGERS of them are remembered."""

    def __missing__(self, value: int) -> int:
        is_narrow = -LIMIT <= value < LIMIT
        found = value >> 63 << 6 | (value & MASK) << 2 | (value == 1) << 1 | is_narrow
        if len(self) < MAX_INTEGERS:
            self[value] = found
        return found


class Site:
    """Compiled kernels for arguments of these types, by key. Three functions pick the tensors, the
    integers, and the constants and truths."""

    def __init__(self, kinds: Sequence[type], are_constant: Sequence[bool]) -> None:
        pairs = list(enumerate(zip(kinds, are_constant, strict=False)))
        tensors = [i for i, (kind, is_constant) in pairs if kind in TENSORS and not is_constant]
        integers = [i for i, (kind, is_constant) in pairs if kind is int and not is_constant]
        values = [i for i, (kind, is_constant) in pairs if is_constant or kind is bool]
        self.tensors, self.integers = _picker(tensors), _picker(integers)
        self.values = _picker(values)
        self.by_key: dict[Key, Prepared] = {}
        served = *TENSORS, int, float, bool, type(None)
        self.is_served = all(is_constant or kind in served for _, (kind, is_constant) in pairs)


class PreparedLaunches:
    """Compiled kernels of one function, by key. They are launched without Triton's work for each
    launch. params: the function's parameters, by Triton.

    Triton derives a kernel's specialisation from all arguments, options and global variables at
    each launch. The key here holds what the specialisation depends on, and no more:

        tensor                      dtype, and its address modulo 16
        integer                     whether it is 1, its remainder modulo 16, and its width
        floating-point number       its type
        truth, constant or option   its type and value

    The types of the arguments by position come first: they decide what is read from which argument
    (`Site`). So each property of all arguments is read by one call. Constants are hashable. An
    argument of any other kind leaves the launch to Triton, and so does a hook of a profiler.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self._are_constant = tuple(each.is_constexpr for each in params)
        self._params = {each.name: each for each in params}
        self._sites: dict[Key, Site] = {}
        self._integers = Integers()

    def launch(self, args: tuple[Any, ...], grid: Any, named: dict[str, Any]) -> bool:
        """Launch the kernel on the current stream if it has been launched with such arguments
        before; return whether it was."""
        site, runtime = self._sites.get(tuple(map(type, args))), knobs.runtime
        if site is None or type(grid) is not tuple:
            return False
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return False
        active = driver.active
        device = active.get_current_device()
        found = site.by_key.get(self._key(site, device, args, named))
        if found is None:
            return False
        launch, facts, constants = found
        num_x, num_y, num_z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        launch(num_x, num_y, num_z, stream, *facts, *args, *constants)
        return True

    def add(self, args: tuple[Any, ...], named: dict[str, Any], compiled: Any) -> None:
        """Add a kernel that Triton has compiled and launched. It is left to Triton if an argument
        that is not constant was given by name, or by its default."""
        kinds = tuple(map(type, args))
        site = self._sites.get(kinds) or Site(kinds, self._are_constant)
        rest = list(self._params.values())[len(args) :]
        are_constants = all(each.is_constexpr for each in rest)
        has_tensors = any(type(each) in TENSORS for each in named.values())
        if compiled is None or not (site.is_served and are_constants) or has_tensors:
            return
        if isinstance(compiled, FutureKernel):  # was compiled by another thread
            compiled = compiled.result()
        constants = tuple(named.get(each.name, each.default) for each in rest)
        self._sites[kinds] = site
        key = self._key(site, driver.active.get_current_device(), args, named)
        site.by_key[key] = Prepared(*_start_of(compiled), constants)

    def _key(self, site: Site, device: int, args: tuple[Any, ...], named: dict[str, Any]) -> Key:
        tensors = site.tensors(args)
        return (
            device,
            *map(_dtype_of, tensors),
            functools.reduce(or_, map(_address_of, tensors), 0) & MASK
            and tuple(_address_of(each) & MASK for each in tensors),
            *map(self._integers.__getitem__, site.integers(args)),
            *site.values(args),
            *named,
            *map(type, named.values()),
            *named.values(),
        )


_dtype_of, _address_of = attrgetter("dtype"), torch.Tensor.data_ptr


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that returns a tuple's items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: tuple(items[i] for i in positions)


def _start_of(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that launches a compiled kernel, and its arguments after the stream. A kernel
    without scratch memory skips Triton's launcher in Python, which only allocates that."""
    start, function, facts = compiled.run, compiled.function, compiled.packed_metadata
    profiler = None, None, None  # metadata of the launch, and two hooks
    needs_memory = not isinstance(start, CudaLauncher) or bool(
        start.global_scratch_size or start.profile_scratch_size
    )
    if needs_memory:
        return start, (function, facts, *profiler)
    options = start.launch_cooperative_grid, start.launch_pdl
    return start.launch, (function, *options, None, None, facts, *profiler)


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

    def __getitem__(self, grid: Any) -> Any:
        """Return a function that launches the kernel over a grid."""
        return functools.partial(self._launch, grid) if prepares() else super().__getitem__(grid)

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        """See JITFunction."""
        warmup = warmup or _only_compiles.get()
        return super().run(*args, grid=grid, warmup=warmup, **named)

    def _launch(self, grid: Any, /, *args: Any, **named: Any) -> None:
        """Launch the kernel in the prepared way; at first in Triton's."""
        only_compiles = _only_compiles.get()
        if only_compiles or not self._prepared.launch(args, grid, named):
            found = self.run(*args, grid=grid, warmup=False, **named)
            if not only_compiles:
                self._prepared.add(args, named, found)


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
    if (found := gpu.gpu_of(device)) is None:
        return max_stages
    return max(1, min(max_stages, found.shared_bytes // stage_bytes))


def next_power_of_2(number: int) -> int:
    """Return the next power of 2, at least 1. (Triton's function of this name returns 0 for 0.)"""
    return 1 << max(0, number - 1).bit_length()
