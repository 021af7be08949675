"""Multiply one to four rows with a plain 16-bit weight, x W^T + b, in one launch that reads it
once.

Shape legend: T tokens, I inputs, O outputs.

A program computes one or a few outputs from all inputs. Its steps over the inputs are unrolled, so
that it loads the weight while it adds. Products are exact in float32. They are summed element by
element, then across the elements at the end, and the result is rounded once. A matrix instruction
would leave most of its rows empty. For few outputs the library splits the inputs and adds the parts
in a second launch.

Measured on an NVIDIA H200, 2026-11-27, bfloat16, in microseconds (`reading`: the weight at 4.35
TB/s). The products ran one after another in a CUDA graph, each with its own weight:

    weight [O, I]                  rows   reading   library     here
    Qwen3-0.6B qkv   4096 x 1024   1, 2       1.9   4.9, 5.3    4.0, 4.8
               o     1024 x 2048   1, 2       1.0  12.0, 10.1   2.7, 3.1
               gate  6144 x 1024   1, 2       2.9   5.9, 6.0    4.9, 6.0
               down  1024 x 3072   1, 2       1.4   7.5, 7.5    3.6, 4.5
               o, down                 4           8.3, 7.6     3.7, 5.0
    1.7B       gate 12288 x 2048   1, 2      11.6  15.5, 15.9  13.7, 14.8
    4B         o     2560 x 4096   1, 2       4.8   9.8, 10.6   7.2, 8.9
    8B         qkv   6144 x 4096   1, 2      11.6  15.9, 16.0  14.0, 15.9
               o     4096 x 4096   1, 2       7.7  13.2, 13.4  10.0, 11.9
               gate 28672 x 4096   1, 2      54.0  59.7, 59.3  56.6, 58.6
               down 4096 x 14336   1, 2      27.0  32.8, 32.3  31.6, 34.2

Four rows with more outputs are left to the library (4B o 10.5 and 11.2, 8B o 13.5 and 15.7).
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import DTYPES, Config, next_power_of_2

MAX_ROWS = 4
MANY_ROWS = 3  # from this number on, only weights with few outputs
FEW_OUTPUTS = 2048  # with so few programs the library splits the inputs
# By number of rows. The library reads larger weights as fast, or faster.
MAX_WEIGHT_BYTES = (256 << 20, 64 << 20, 64 << 20, 64 << 20)

TILE = 2048  # numbers of the weight that a program reads per step; up to twice as many for two rows
NARROW_INPUTS, NARROW_STEPS = 1024, 8  # of a step; more steps would spill registers
MAX_STEPS = 16  # steps of TILE inputs
MIN_INPUTS, INPUTS_MULTIPLE = 256, 16  # for 16-byte loads in each row of the weight


def serves(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Return whether to use `few_rows` for x [T, I] and weight [O, I], by number of rows, dtypes
    and the weight's size."""
    if x_TI.dim() != 2 or not 1 <= len(x_TI) <= MAX_ROWS or x_TI.dtype.itemsize != 2:
        return False
    if weight_OI.dim() != 2 or weight_OI.dtype != x_TI.dtype or not weight_OI.is_contiguous():
        return False
    num_outputs, num_inputs = weight_OI.shape
    if num_inputs < MIN_INPUTS or num_inputs % INPUTS_MULTIPLE or num_outputs == 0:
        return False
    if len(x_TI) >= MANY_ROWS and num_outputs > FEW_OUTPUTS:
        return False
    max_bytes = MAX_WEIGHT_BYTES[len(x_TI) - 1]
    return weight_OI.nbytes <= max_bytes and num_inputs <= MAX_STEPS * TILE


def step_tile(num_rows: int, num_inputs: int) -> tuple[int, int]:
    """Return a program's tile: outputs per program, and inputs per step of its loop."""
    is_narrow = num_inputs <= NARROW_STEPS * NARROW_INPUTS
    inputs = min(NARROW_INPUTS, next_power_of_2(num_inputs)) if is_narrow else TILE
    if num_rows == 2 and is_narrow:
        return 2 * TILE // inputs, inputs
    if num_inputs % TILE == 0:
        inputs = TILE
    return TILE // inputs, inputs


@triton.jit
def _load(at, inside, IS_FULL: tl.constexpr):
    if IS_FULL:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_row(out_ptr, row, total, bias, outputs, num_outputs):
    found = (tl.sum(total, 1) + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_outputs + outputs, found, mask=outputs < num_outputs)


@triton.jit(do_not_specialize=["num_outputs"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Out-of-range outputs repeat the last one and are not stored.
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weight_at = weight_ptr + weight_rows[:, None] * INPUTS + depth[None, :]
    x_at = x_ptr + depth[None, :]
    # Totals of rows that x does not have are never used.
    total_0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for start in tl.static_range(0, INPUTS, BLOCK_K):
        inside = (start + depth < INPUTS)[None, :]
        weight = _load(weight_at + start, inside, start + BLOCK_K <= INPUTS)
        x = x_at + start
        total_0 += weight * _load(x, inside, start + BLOCK_K <= INPUTS)
        if ROWS > 1:
            total_1 += weight * _load(x + INPUTS, inside, start + BLOCK_K <= INPUTS)
        if ROWS > 2:
            total_2 += weight * _load(x + 2 * INPUTS, inside, start + BLOCK_K <= INPUTS)
        if ROWS > 3:
            total_3 += weight * _load(x + 3 * INPUTS, inside, start + BLOCK_K <= INPUTS)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_rows).to(tl.float32)
    _store_row(out_ptr, 0, total_0, bias, outputs, num_outputs)
    if ROWS > 1:
        _store_row(out_ptr, 1, total_1, bias, outputs, num_outputs)
    if ROWS > 2:
        _store_row(out_ptr, 2, total_2, bias, outputs, num_outputs)
    if ROWS > 3:
        _store_row(out_ptr, 3, total_3, bias, outputs, num_outputs)


def few_rows(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [T, O] in x's dtype. The arguments must satisfy `serves`, but may be
    float32 too."""
    (num_tokens, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    assert 1 <= num_tokens <= MAX_ROWS and weight_OI.shape[1] == num_inputs
    assert num_inputs <= MAX_STEPS * TILE and weight_OI.is_contiguous()
    out_TO = x_TI.new_empty(num_tokens, num_outputs)
    constants = _constants(num_tokens, num_inputs)
    _few_rows_kernel[(triton.cdiv(num_outputs, constants["BLOCK_N"]),)](
        x_TI.contiguous(),
        weight_OI,
        weight_OI if bias_O is None else bias_O.contiguous(),
        out_TO,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        **constants,
    )
    return out_TO


def _constants(num_tokens: int, num_inputs: int) -> dict[str, int]:
    outputs, inputs = step_tile(num_tokens, num_inputs)
    return {"ROWS": num_tokens, "INPUTS": num_inputs, "BLOCK_N": outputs, "BLOCK_K": inputs}


def _config(num_tokens: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16) -> Config:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{DTYPES[dtype]}")
    return Config(
        _few_rows_kernel,
        pointers | {"num_outputs": "i32"},
        _constants(num_tokens, num_inputs) | {"HAS_BIAS": dtype == torch.float16},
    )


# Inputs of Qwen3-0.6B (qkv, gate and up; o; down) and of 8B (qkv, o; down). Then sizes that use the
# maximum of registers, and sizes that are no multiple of a step.
CONFIGS = [
    *(_config(rows, inputs) for inputs in (1024, 2048, 3072, 4096, 14336) for rows in (4, 1, 2)),
    *(_config(4, steps - 16, torch.float16) for steps in (MAX_STEPS * TILE, 8192, 512)),
]
