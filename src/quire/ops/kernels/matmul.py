"""Multiply x W^T + b with one order of sums: a row's bits do not depend on the number of rows.

Shape legend: T tokens, I inputs, O outputs.

For other numbers of rows the matrix library chooses another kernel, and with it another order of
sums. Here tile and order depend on the weight alone. Tiles have 64 rows, most of them empty when a
few tokens are decoded. Hopper's matrix instruction takes at least 64, and the older instruction
adds in another order. One program adds the inputs from first to last, in float32, and rounds once
at the end. Programs of 8 tiles of rows share a tile of the weight in the L2 cache.

Expected on an H200, not measured. A few tokens: reading the weight is the limit, by O / 64 programs
with 48 KB in flight each. 64 programs (O = 4,096) may reach two thirds of 4.3 TB/s. Many tokens:
tiles of 64 x 128 read 0.023 bytes per operation from the L2 cache, tiles of 64 x 64 read 0.031.
This allows about 300 and 200 TFLOP/s, where the library reaches 700.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import DTYPES, Config, dot_dtype, kernel, stages_that_fit

ROW_GROUP = 8  # tiles of rows that share a tile of the weight


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's product: rows of x, outputs, and inputs of a step."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


WIDE = Tile(64, 128, 64, num_warps=4, num_stages=4)
NARROW = Tile(64, 64, 128, num_warps=4, num_stages=4)
TILE_OF_FLOAT32 = Tile(64, 64, 32, num_warps=4, num_stages=3)
WIDE_OUTPUTS = 8192  # from here on wide tiles give enough programs for one row


def tile_for(num_outputs: int, dtype: torch.dtype) -> Tile:
    """Return a weight's tile, the same for any number of rows."""
    if dtype.itemsize > 2:
        return TILE_OF_FLOAT32
    return WIDE if num_outputs >= WIDE_OUTPUTS else NARROW


@kernel(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles, columns_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    group = program // (ROW_GROUP * columns_tiles)
    group_rows = tl.minimum(row_tiles - group * ROW_GROUP, ROW_GROUP)
    within = program % (ROW_GROUP * columns_tiles)
    rows = (group * ROW_GROUP + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_tokens, columns < num_outputs
    depth = tl.arange(0, BLOCK_K)
    # Out-of-range columns repeat the last one and are not stored; out-of-range rows are not read.
    weight_rows = tl.minimum(columns, num_outputs - 1).to(tl.int64)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * num_inputs + depth[None, :]
    weight_at = weight_ptr + weight_rows[None, :] * num_inputs + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        if IS_EVEN:
            x = tl.load(x_at, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_at)
        else:
            left = num_inputs - start
            x = tl.load(x_at, mask=is_row[:, None] & (depth < left)[None, :], other=0.0)
            weight = tl.load(weight_at, mask=(depth < left)[:, None], other=0.0)
        total = tl.dot(x.to(DOT), weight.to(DOT), total, input_precision="tf32x3")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=is_column, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [T, O] in x's dtype, which is also the weight's."""
    (num_tokens, num_inputs), num_outputs = x_TI.shape, weight_OI.shape[0]
    assert weight_OI.shape[1] == num_inputs and weight_OI.dtype == x_TI.dtype
    assert weight_OI.is_contiguous(), f"rows must follow, got {weight_OI.stride()}"
    out_TO = x_TI.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out_TO
    tile = tile_for(num_outputs, x_TI.dtype)
    grid = triton.cdiv(num_tokens, tile.rows) * triton.cdiv(num_outputs, tile.outputs)
    step_bytes = (tile.rows + tile.outputs) * tile.inputs * x_TI.element_size()
    _matmul_kernel[(grid,)](
        x_TI.contiguous(),
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_TO,
        num_tokens,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias_O is not None,
        **_constants(tile, num_inputs),
        DOT=dot_dtype(x_TI.dtype),
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(tile.num_stages, step_bytes, x_TI.device),
    )
    return out_TO


def _constants(tile: Tile, num_inputs: int) -> dict[str, int]:
    return {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
        "ROW_GROUP": ROW_GROUP,
        "IS_EVEN": num_inputs % tile.inputs == 0,
    }


def _config(dtype: torch.dtype, num_outputs: int, num_inputs: int, has_bias: bool) -> Config:
    tile, kind = tile_for(num_outputs, dtype), DTYPES[dtype]
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{kind}")
    return Config(
        _matmul_kernel,
        pointers | dict.fromkeys(("num_tokens", "num_outputs", "num_inputs"), "i32"),
        _constants(tile, num_inputs) | {"HAS_BIAS": has_bias, "DOT": kind},
        tile.num_warps,
        tile.num_stages,
        divisible=("num_outputs", "num_inputs"),
        needs_wgmma=True,
    )


CONFIGS = [
    _config(torch.bfloat16, 4096, 4096, False),
    _config(torch.bfloat16, 28672, 4096, False),
    _config(torch.bfloat16, 28672, 4112, True),
    _config(torch.float16, 6144, 4096, True),
    _config(torch.float32, 4096, 4096, True),
]
