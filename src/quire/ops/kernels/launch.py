"""What kernels share: whether Triton interprets, and what a module tells of its launches."""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

VERSION = str(triton.__version__)
INTERPRETED = bool(triton.knobs.runtime.interpret)

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Config:
    """One way in which production launches a kernel, to be compiled ahead of time.

    signature: Triton's types of the arguments, by name ("*bf16", "i32", "fp32"); constants: the
    constexpr arguments. divisible: arguments that are multiples of 16, pointers always are.
    needs_wgmma: its dots must be Hopper's.
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
    """Choose what a dot multiplies: float32 under the interpreter, whose bfloat16 is wrong."""
    return tl.float32 if INTERPRETED else DTYPES[dtype]


def stages_that_fit(most: int, stage_bytes: int, device: torch.device) -> int:
    """Count the stages of loads that fit shared memory; what is computed is the same with any."""
    if device.type != "cuda":
        return most
    space = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return int(max(1, min(most, space // stage_bytes)))


def next_power_of_2(number: int) -> int:
    """At least 1: a tile is never empty. (Triton's function of that name gives 0 for 0.)"""
    return 1 << max(0, number - 1).bit_length()
