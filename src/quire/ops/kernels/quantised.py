"""Multiply x W^T + b with a quantised weight, which is expanded within the product.

Shape legend: T tokens, N outputs, K inputs, C chunks of inputs, G groups of inputs that share a
scale, S splits of the inputs. `quire/ops/weights/gpu_weights.py` describes the weight's memory
layout.

    out[t, n] = sum over groups of  scale[n, g] * sum over the group's inputs of (code - zero) * x

Codes become operands of 16 bits in registers. They are exactly code - zero, since bfloat16 holds
integers up to 256, and float16 and bfloat16 hold e4m3 and e2m1 too. A group's sum is multiplied by
its float32 scale in float32. So weights equal the checkpoint's, and only sums are rounded. The
outputs are the rows of the matrix instruction, the tokens its columns. So the expanded operand
stays in registers, and a few tokens make the instruction short. Zeros that are not integers are
applied to the group's sum of x.

Few tokens: tiles have 16 tokens. If outputs alone give too few programs, the inputs are split over
programs, and another launch adds the splits in order. A weight with a fixed order of sums has one
tile for any number of tokens, and no splits. So a row's bits do not depend on other rows.

Expected on an H200, not measured. A few tokens: bytes are the limit, 0.56 a parameter in 4 bits
with a scale for each 32, and 1.02 in 8. (Llama-3.1-8B in 4 bits: 4.2 GB, 1.0 ms at 4.3 TB/s.) As
compiled, the loop has 3.1 to 4.8 instructions for a weight of 4 bits and 3.1 to 5 for one of 8.
Reading a weight takes as long as 3.3 and 6.6 instructions. This allows 65 to 85 % of that bandwidth
in 4 bits, and no less in 8. Many tokens: a tile of 128 outputs and 64 tokens takes 512 cycles of
the matrix unit for 128 inputs. Expanding and scaling take as many, which the other tile on a
multiprocessor hides in part. This gives half to two thirds of the rate of 16-bit products, 350 to
500 TFLOP/s.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import DTYPES, Config, dot_dtype, kernel, stages_that_fit
from quire.ops.weights.gpu_layout import GPULayout, layout_of
from quire.ops.weights.gpu_weights import BITS, GPUWeight

ROW_GROUP = 8  # tiles of tokens that share a tile of the weight
PROGRAMS = 264  # programs that fill a GPU of 132 multiprocessors twice
MIN_CHUNKS = 4  # minimum chunks of a split
SPLIT_TOKENS = 64  # more tokens give enough programs without splits
SUM_WIDTH = 1024


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's tile: outputs and tokens."""

    outputs: int
    tokens: int
    num_warps: int
    num_stages: int


FEW = Tile(64, 16, num_warps=4, num_stages=4)
FEW_OF_MANY_OUTPUTS = Tile(128, 16, num_warps=4, num_stages=4)
SOME = Tile(64, 32, num_warps=4, num_stages=4)
MORE = Tile(64, 64, num_warps=4, num_stages=3)
MANY = Tile(128, 64, num_warps=8, num_stages=3)
TILE_OF_FLOAT32 = Tile(64, 16, num_warps=4, num_stages=2)
MANY_OUTPUTS = 8192


def tile_for(num_tokens: int, num_outputs: int, dtype: torch.dtype, is_fixed: bool) -> Tile:
    """Return the tile of a product; with is_fixed, the same one for any number of tokens."""
    if dtype.itemsize > 2:
        return TILE_OF_FLOAT32
    if is_fixed:
        return MORE
    if num_tokens <= FEW.tokens:
        return FEW if num_outputs < MANY_OUTPUTS else FEW_OF_MANY_OUTPUTS
    if num_tokens <= SOME.tokens:
        return SOME
    programs = triton.cdiv(num_tokens, MANY.tokens) * triton.cdiv(num_outputs, MANY.outputs)
    return MANY if programs >= PROGRAMS // 2 else MORE


def chunks_of_split(num_tokens: int, tile: Tile, weight: GPUWeight) -> int:
    """Return the number of chunks that a program multiplies: all, or few enough to give enough
    programs."""
    num_chunks = weight.codes.shape[-3]
    if weight.is_fixed or num_tokens > SPLIT_TOKENS:
        return num_chunks
    programs = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(weight.shape[-2], tile.outputs)
    splits = max(1, min(PROGRAMS // programs, num_chunks // MIN_CHUNKS))
    return int(triton.cdiv(num_chunks, splits))


# ---- codes into numbers ----------------------------------------------------------------------


@triton.jit
def code_bits(words, SHIFT: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Return bits of DOT for a plane's codes, one or two numbers in 32 bits; `numbers` turns them
    into the codes' values. With 16 bits one instruction handles both lanes of a word."""
    MANTISSA: tl.constexpr = DOT.fp_mantissa_width
    BIAS: tl.constexpr = DOT.exponent_bias
    WIDTH: tl.constexpr = DOT.primitive_bitwidth
    LANES: tl.constexpr = 0x00010001 if WIDTH == 16 else 1
    # The number 2^MANTISSA, whose last bit has the value 1.
    WHOLE: tl.constexpr = ((MANTISSA + BIAS) << MANTISSA) * LANES
    codes = words >> SHIFT
    if WIDTH == 32:
        codes = paired(codes & 0xFFFF, codes >> 16)
    if FORMAT == "int4":
        return (codes & (15 * LANES)) | WHOLE
    elif FORMAT == "int8":
        if MANTISSA == 7:  # 2^8 plus all bits but the last, which `numbers` adds
            return ((codes >> 1) & (0x7F * LANES)) | (WHOLE + 0x80 * LANES)
        else:
            return (codes & (0xFF * LANES)) | WHOLE
    elif FORMAT == "fp8":
        sign = (codes << (WIDTH - 8)) & ((0x80 << (WIDTH - 8)) * LANES)
        return sign | ((codes << (MANTISSA - 3)) & ((0x7F << (MANTISSA - 3)) * LANES))
    else:
        sign = (codes << (WIDTH - 4)) & ((8 << (WIDTH - 4)) * LANES)
        return sign | ((codes << (MANTISSA - 1)) & ((7 << (MANTISSA - 1)) * LANES))


@triton.jit
def numbers(words, SHIFT: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Return the numbers [N, 2 W] of DOT that a plane of words [N, W] stands for, before zeros are
    subtracted."""
    MANTISSA: tl.constexpr = DOT.fp_mantissa_width
    BIAS: tl.constexpr = DOT.exponent_bias
    values = floats(code_bits(words, SHIFT, FORMAT, DOT), DOT)
    if FORMAT == "int4":
        return values - (2.0**MANTISSA + 8.0)
    elif FORMAT == "int8":
        if MANTISSA == 7:
            last = floats(((words >> SHIFT) & 0x00010001) | 0x43004300, DOT)  # last bit plus 128
            return (values - 512.0) + last
        else:
            return values - (2.0**MANTISSA + 128.0)
    elif FORMAT == "fp8":
        return values * (2.0 ** (BIAS - 7))
    else:
        return values * (2.0 ** (BIAS - 1))


@triton.jit
def floats(bits, DOT: tl.constexpr):
    if DOT.primitive_bitwidth == 32:
        return bits.to(DOT, bitcast=True)
    else:
        low = (bits & 0xFFFF).to(tl.uint16).to(DOT, bitcast=True)
        return paired(low, (bits >> 16).to(tl.uint16).to(DOT, bitcast=True))


@triton.jit
def paired(low, high):
    """Interleave [N, W] and [N, W] to [N, 2 W]."""
    return tl.join(low, high).reshape(low.shape[0], 2 * low.shape[1])


@triton.jit
def factor(scale, FORMAT: tl.constexpr):
    """Return a scale in float32. The bits of an e8m0 scale stand for 2^(scale - 127)."""
    if FORMAT == "mxfp4":
        bits = tl.maximum(scale.to(tl.uint32) << 23, 0x00400000)  # the smallest one is subnormal
        return bits.to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)


@triton.jit
def load_some(at, stride, COUNT: tl.constexpr):
    if COUNT == 1:
        return (tl.load(at),)
    elif COUNT == 2:
        return (tl.load(at), tl.load(at + stride))
    else:
        return (
            tl.load(at),
            tl.load(at + stride),
            tl.load(at + 2 * stride),
            tl.load(at + 3 * stride),
        )


# ---- the product -----------------------------------------------------------------------------


@triton.jit
def sums_of_chunks(
    x_at,
    is_row,
    codes_at,
    scales_at,
    zeros_at,
    num_outputs,
    num_inputs,
    first,
    last,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    DOT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the products of chunks [first, last), float32 [BLOCK_N, BLOCK_M].

    x_at: addresses of the first plane of the first chunk, [2 WORDS, BLOCK_M]. codes_at: addresses
    of the first chunk, [BLOCK_N, WORDS]. scales_at, zeros_at: addresses of group 0, [BLOCK_N].
    Scales are loaded one chunk in advance.
    """
    PLANE: tl.constexpr = 2 * WORDS
    CHUNK: tl.constexpr = PLANES * PLANE
    SPAN: tl.constexpr = GROUP if GROUP > 0 and GROUP < CHUNK else CHUNK  # inputs of a sum
    COUNT: tl.constexpr = CHUNK // SPAN
    depth = tl.arange(0, PLANE)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # sums of the same inputs, equal in each row
    group = first * CHUNK // GROUP if GROUP > 0 else 0
    scales = load_some(scales_at + group * num_outputs, num_outputs, COUNT)
    zeros = (
        scales if ZEROS == "none" else load_some(zeros_at + group * num_outputs, num_outputs, COUNT)
    )
    for chunk in range(first, last):
        words = tl.load(codes_at).to(tl.uint32, bitcast=True)
        codes_at += num_outputs.to(tl.int64) * WORDS
        group = tl.minimum(chunk + 1, last - 1) * CHUNK // GROUP if GROUP > 0 else 0
        next_scales = load_some(scales_at + group * num_outputs, num_outputs, COUNT)
        next_zeros = (
            next_scales
            if ZEROS == "none"
            else load_some(zeros_at + group * num_outputs, num_outputs, COUNT)
        )
        for plane in tl.static_range(PLANES):
            mask = is_row[None, :]
            if not IS_EVEN:
                mask = mask & (depth < num_inputs - chunk * CHUNK - plane * PLANE)[:, None]
            x = tl.load(x_at + plane * PLANE, mask=mask, other=0.0)
            weight = numbers(words, plane * (16 // PLANES), FORMAT, DOT)
            if ZEROS == "whole":
                weight -= zeros[plane * PLANE // SPAN].to(DOT)[:, None]
            if GROUP > 0 and plane * PLANE % SPAN == 0:
                part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                x_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            part = tl.dot(weight, x.to(DOT), part, input_precision="tf32x3")
            if ZEROS == "any":
                ones = tl.full([BLOCK_N, PLANE], 1.0, DOT)
                x_sum = tl.dot(ones, x.to(DOT), x_sum, input_precision="tf32x3")
            if GROUP > 0 and (plane + 1) * PLANE % SPAN == 0:
                if ZEROS == "any":
                    part -= zeros[plane * PLANE // SPAN][:, None] * x_sum
                total += part * factor(scales[plane * PLANE // SPAN], FORMAT)[:, None]
        scales = next_scales
        zeros = next_zeros
        x_at += CHUNK
    if GROUP == 0:
        if ZEROS == "any":
            part -= zeros[0][:, None] * x_sum
        total = part * factor(scales[0], FORMAT)[:, None]
    return total


@kernel(do_not_specialize=["num_tokens", "chunks_of_split"])
def _matmul_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_inputs,
    num_chunks,
    chunks_of_split,
    x_row,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    DOT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROW_GROUP: tl.constexpr,
):
    """Write out[split, token, output]; without splits this is the result itself."""
    program = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    row_group = program // (ROW_GROUP * output_tiles)
    group_rows = tl.minimum(row_tiles - row_group * ROW_GROUP, ROW_GROUP)
    within = program % (ROW_GROUP * output_tiles)
    tokens = (row_group * ROW_GROUP + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = tokens < num_tokens, outputs < num_outputs
    split = tl.program_id(1)
    first = split * chunks_of_split
    # Out-of-range outputs repeat the last one and are not stored; out-of-range rows are not read.
    safe = tl.minimum(outputs, num_outputs - 1)
    depth, words = tl.arange(0, 2 * WORDS), tl.arange(0, WORDS)
    x_at = x_ptr + tokens.to(tl.int64)[None, :] * x_row + depth[:, None]
    codes_at = codes_ptr + first.to(tl.int64) * num_outputs * WORDS
    total = sums_of_chunks(
        x_at + first * (2 * WORDS * PLANES),
        is_row,
        codes_at + (safe[:, None] * WORDS + words[None, :]),
        scales_ptr + safe,
        zeros_ptr + safe,
        num_outputs,
        num_inputs,
        first,
        tl.minimum(first + chunks_of_split, num_chunks),
        FORMAT,
        ZEROS,
        GROUP,
        WORDS,
        PLANES,
        DOT,
        IS_EVEN,
        BLOCK_N,
        BLOCK_M,
    )
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[:, None]
    rows = split.to(tl.int64) * num_tokens + tokens
    out = out_ptr + rows[None, :] * num_outputs + outputs[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@kernel(do_not_specialize=["num_tokens", "num_splits"])
def _add_kernel(
    parts_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write to out[token] the splits' sums, added in order, and the bias."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < num_outputs
    total = tl.zeros([WIDTH], tl.float32)
    for split in range(num_splits):
        places = parts_ptr + (split * num_tokens + token) * num_outputs + at
        total += tl.load(places, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_outputs + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def matmul(
    x_TK: torch.Tensor, weight: GPUWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `quire.ops.weights.gpu_weights.multiply`, [T, K] to [T, N], for inputs in the
    weight's order."""
    (num_tokens, num_inputs), num_outputs = x_TK.shape, weight.shape[0]
    assert num_inputs == weight.num_inputs and x_TK.stride(1) == 1
    out_TN = x_TK.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out_TN
    tile = tile_for(num_tokens, num_outputs, x_TK.dtype, weight.is_fixed)
    num_chunks, of_split = weight.codes.shape[0], chunks_of_split(num_tokens, tile, weight)
    splits = triton.cdiv(num_chunks, of_split)
    parts = out_TN
    if splits > 1:
        parts = x_TK.new_empty(splits, num_tokens, num_outputs, dtype=torch.float32)
    grid = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_outputs, tile.outputs), splits
    _matmul_kernel[grid](
        x_TK,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out_TN if bias_N is None else bias_N,
        parts,
        num_tokens,
        num_outputs,
        num_inputs,
        num_chunks,
        of_split,
        x_TK.stride(0),
        **constants_of(weight, dot_dtype(x_TK.dtype)),
        **_constants(tile),
        HAS_BIAS=bias_N is not None and splits == 1,
        num_warps=tile.num_warps,
        num_stages=stages_of(tile, weight, x_TK),
    )
    if splits > 1:
        _add_kernel[(num_tokens, triton.cdiv(num_outputs, SUM_WIDTH))](
            parts, out_TN if bias_N is None else bias_N, out_TN, num_tokens, num_outputs, splits,
            HAS_BIAS=bias_N is not None, WIDTH=SUM_WIDTH,
        )  # fmt: skip
    return out_TN


def stages_of(tile: Tile, weight: GPUWeight, x: torch.Tensor) -> int:
    """Return how many chunks, each a pipeline stage, fit into shared memory. x: [T, K]."""
    words, inputs = weight.layout.words, weight.layout.chunk_inputs
    chunk_bytes = 4 * tile.outputs * words + tile.tokens * inputs * x.element_size()
    return stages_that_fit(tile.num_stages, chunk_bytes, x.device)


def constants_of(weight: GPUWeight, dot: tl.dtype) -> dict[str, Any]:
    """Return the compile-time constants of `sums_of_chunks` for a weight."""
    zeros = "none"
    if weight.zeros is not None:
        zeros = "whole" if weight.zeros.dtype == torch.int8 else "any"
    return form_of(weight.format, zeros, weight.layout, weight.num_inputs, dot)


def form_of(
    format: str, zeros: str, layout: GPULayout, num_inputs: int, dot: tl.dtype
) -> dict[str, Any]:
    return {
        "FORMAT": format,
        "ZEROS": zeros,
        "GROUP": layout.group,
        "WORDS": layout.words,
        "PLANES": layout.planes,
        "DOT": dot,
        "IS_EVEN": num_inputs % layout.chunk_inputs == 0,
    }


def _constants(tile: Tile) -> dict[str, int]:
    return {"BLOCK_N": tile.outputs, "BLOCK_M": tile.tokens, "ROW_GROUP": ROW_GROUP}


# ---- compiled ahead of time: Llama-3.1-8B's gate and up, and Qwen3-0.6B's down ---------------

_POINTERS = {"codes_ptr": "*i32", "parts_ptr": "*fp32"}
_DIVISIBLE = ("num_outputs", "num_inputs", "x_row")


def config_of(kernel: Any, constants: dict[str, Any], types: dict[str, str], tile: Tile) -> Config:
    """Return a launch whose arguments have these types by name, or else the usual type of the
    name."""
    names = [name for name in kernel.arg_names if name not in constants]
    usual = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    return Config(
        kernel,
        {name: (usual | _POINTERS | types)[name] for name in names},
        constants,
        tile.num_warps,
        tile.num_stages,
        divisible=tuple(name for name in names if name in _DIVISIBLE),
        needs_wgmma=tile is not TILE_OF_FLOAT32,
    )


def _config(
    format: str, group: int, tile: Tile, zeros: str = "none", dtype: torch.dtype = torch.bfloat16
) -> Config:
    layout, kind = layout_of(BITS[format], group, 4096), DTYPES[dtype]
    types = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{kind}")
    types["scales_ptr"] = {"mxfp4": "*u8", "fp8": "*fp32"}.get(format, "*bf16")
    types["zeros_ptr"] = {"whole": "*i8", "any": "*fp32"}.get(zeros, types["scales_ptr"])
    constants = form_of(format, zeros, layout, 4096, kind) | _constants(tile) | {"HAS_BIAS": False}
    return config_of(_matmul_kernel, constants, types, tile)


CONFIGS = [
    *(_config("int4", 32, tile) for tile in (FEW, FEW_OF_MANY_OUTPUTS, SOME, MORE, MANY)),
    *(_config("int8", 128, tile) for tile in (FEW, FEW_OF_MANY_OUTPUTS, MANY)),
    *(_config("fp8", 0, tile) for tile in (FEW_OF_MANY_OUTPUTS, MORE, MANY)),
    *(_config("fp8", 128, tile) for tile in (FEW, MANY)),
    *(_config("mxfp4", 32, tile) for tile in (FEW, MANY)),
    *(_config("int4", 128, tile, "whole") for tile in (FEW_OF_MANY_OUTPUTS, MANY)),
    *(_config("int4", 32, tile, "any") for tile in (FEW, MORE)),
    _config("int8", 16, MANY, dtype=torch.float16),
    _config("int4", 32, TILE_OF_FLOAT32, dtype=torch.float32),
    config_of(_add_kernel, {"HAS_BIAS": False, "WIDTH": SUM_WIDTH}, {}, TILE_OF_FLOAT32),
]
