"""Launch a kernel that has been launched before, without Triton's work for each launch.

Triton derives a kernel's specialisation from all arguments, options and global variables whenever
it launches it. The key here holds what the specialisation depends on, and no more:

    tensor                      dtype, and its address modulo 16
    integer                     whether it is 1, its remainder modulo 16, and its length in words
    floating-point number       its type
    truth, constant or option   its type and value

An argument of any other kind leaves the launch to Triton, and so does a hook of a profiler.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.runtime import driver

MASK = 15  # Triton specialises for addresses and integers that are multiples of 16
Key = tuple[Any, ...]


class Prepared(NamedTuple):
    """A compiled kernel: what Triton launches it with. constants: values of its arguments after
    those given by position."""

    launch: Any
    function: Any
    facts: Any
    constants: tuple[Any, ...]


class PreparedLaunches:
    """Compiled kernels of one function, by key. params: the function's parameters, by Triton."""

    def __init__(self, params: Sequence[Any]) -> None:
        self._is_constant = tuple(each.is_constexpr for each in params)
        self._params = {each.name: each for each in params}
        self._by_key: dict[Key, Prepared] = {}

    def launch(self, args: tuple[Any, ...], grid: Any, named: dict[str, Any]) -> bool:
        """Launch the kernel on the current stream if it has been launched with such arguments
        before; return whether it was."""
        key = self._key(args, named)
        found = None if key is None else self._by_key.get(key)
        if found is None or callable(grid) or _has_hooks():
            return False
        launch, function, facts, constants = found
        num_x, num_y, num_z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(key[0])
        launch(num_x, num_y, num_z, stream, function, facts, None, None, None, *args, *constants)
        return True

    def add(self, args: tuple[Any, ...], named: dict[str, Any], compiled: Any) -> None:
        """Add a kernel that Triton has compiled and launched. It is left to Triton if an argument
        that is not constant was given by name, or by its default."""
        key = self._key(args, named)
        rest = list(self._params.values())[len(args) :]
        are_constants = all(each.is_constexpr for each in rest)
        if key is None or compiled is None or not are_constants:
            return
        if hasattr(compiled, "result"):  # was compiled by another thread
            compiled = compiled.result()
        constants = tuple(named.get(each.name, each.default) for each in rest)
        facts = compiled.packed_metadata
        self._by_key[key] = Prepared(compiled.run, compiled.function, facts, constants)

    def _key(self, args: tuple[Any, ...], named: dict[str, Any]) -> Key | None:
        """Return the key of a launch; None if it is left to Triton."""
        parts: list[Any] = [driver.active.get_current_device(), len(args)]
        for value, is_constant in zip(args, self._is_constant, strict=False):
            kind = type(value)
            if kind is torch.Tensor and not is_constant:
                parts += value.dtype, value.data_ptr() & MASK
            elif kind is int and not is_constant:
                parts += value == 1, value & MASK, value.bit_length() // 32
            elif kind is float and not is_constant:
                parts.append(float)
            elif is_constant or value is None or kind is bool:
                parts += kind, value
            else:
                return None
        kinds = tuple(map(type, named.values()))
        if torch.Tensor in kinds:
            return None
        return (*parts, *named, *kinds, *named.values())


def _has_hooks() -> bool:
    """Return whether a profiler listens to launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
