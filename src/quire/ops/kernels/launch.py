"""Helpers that all kernels share: whether Triton interprets, dtypes, and the launches to
compile."""

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
    memory.
    Results do not depend on it."""
    if device.type != "cuda":
        return max_stages
    space = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return int(max(1, min(max_stages, space // stage_bytes)))


def next_power_of_2(number: int) -> int:
    """Return the next power of 2, at least 1. (Triton's function of this name returns 0 for 0.)"""
    return 1 << max(0, number - 1).bit_length()
