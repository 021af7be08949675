"""Multiply many tokens with a weight in e4m3, x W^T + b; activations are rounded to e4m3 as well.

Shape legend: T tokens, N outputs, K inputs, C chunks of 128 inputs.
`quire/ops/weights/gpu_weights.py` describes the weight's memory layout.

The references of such checkpoints compute this way, even for a few tokens. At run time they scale
each row of x to 448. If the weight has a scale per 128 inputs, they scale each 128 inputs of x
instead. Products are e4m3, sums float32, and the scales multiply the sums. In this engine a few
tokens keep 16 bits (quantised.py). Reading the weight takes longer than either product, and 16 bits
are more exact. Hopper's e4m3 instruction adds with fewer bits than float32, so its sums go into
float32 after each 128 inputs.

The weight's bytes have an order of their own within a chunk, and x is rounded into the same order.

Expected on an H200, not measured: tiles of 128 x 128 read 0.0078 bytes per operation from the L2
cache. This allows 800 of 1,580 TFLOP/s, twice what the expanded product reaches. Rounding x moves 3
bytes per number: 6 us for 2,048 tokens of 4,096, next to 0.6 ms for a product with 28,672 outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import INTERPRETED, Config, kernel, stages_that_fit
from quire.ops.weights.gpu_weights import GPUWeight

CHUNK = 128
ROUNDED_CHUNKS = 16  # chunks that a program rounds together
TILE = 128  # tokens, and outputs, of a program
ROW_GROUP = 8
NUM_WARPS, NUM_STAGES = 8, 4
LARGEST = 448.0


@kernel()
def _round_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    num_inputs,
    num_chunks,
    x_row,
    BY_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Round a row of x to e4m3 in the weight's order of bytes; store its scale, or a scale per
    chunk."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    # Byte 4 j + p + 2 e of a chunk belongs to plane p, pair j, and element e of the pair.
    inputs = at % 2 * (CHUNK // 2) + at // 4 * 2 + at // 2 % 2
    x_at = x_ptr + row * x_row
    scale = tl.full([CHUNKS], 1.0, tl.float32)
    if not BY_CHUNK:
        largest = tl.zeros([CHUNKS], tl.float32)
        for first in range(0, num_chunks, CHUNKS):
            input_at = (first + tl.arange(0, CHUNKS))[:, None] * CHUNK + at[None, :]
            x = tl.load(x_at + input_at, mask=input_at < num_inputs, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        scale = scale_of(tl.full([CHUNKS], 1.0, tl.float32) * tl.max(largest, axis=0), LARGEST)
        tl.store(scales_ptr + row + tl.arange(0, CHUNKS), scale, mask=tl.arange(0, CHUNKS) == 0)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        input_at = chunks[:, None] * CHUNK + inputs[None, :]
        x = tl.load(x_at + input_at, mask=input_at < num_inputs, other=0.0).to(tl.float32)
        if BY_CHUNK:
            scale = scale_of(tl.max(tl.abs(x), axis=1), LARGEST)
            tl.store(scales_ptr + row * num_chunks + chunks, scale, mask=chunks < num_chunks)
        shares = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])  # / is an approximation
        values = tl.minimum(tl.maximum(shares, -LARGEST), LARGEST, tl.PropagateNan.ALL)
        codes_at = codes_ptr + (row * num_chunks + chunks[:, None]) * CHUNK + at[None, :]
        mask = (chunks < num_chunks)[:, None] & (at < CHUNK)[None, :]
        tl.store(codes_at, values.to(tl.float8e4nv), mask=mask)


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    return tl.where(largest > 0.0, tl.div_rn(largest, tl.zeros_like(largest) + LARGEST), 1.0)


@kernel(do_not_specialize=["num_tokens"])
def _product_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_outputs,
    num_chunks,
    BY_CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROW_GROUP: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(num_tokens, TILE), tl.cdiv(num_outputs, TILE)
    row_group = program // (ROW_GROUP * output_tiles)
    group_rows = tl.minimum(row_tiles - row_group * ROW_GROUP, ROW_GROUP)
    within = program % (ROW_GROUP * output_tiles)
    tokens = (row_group * ROW_GROUP + within % group_rows) * TILE + tl.arange(0, TILE)
    outputs = within // group_rows * TILE + tl.arange(0, TILE)
    is_row, is_output = tokens < num_tokens, outputs < num_outputs
    # Out-of-range rows and outputs repeat the last one and are not stored.
    rows = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    safe = tl.minimum(outputs, num_outputs - 1)
    depth = tl.arange(0, CHUNK)
    x_at = x_ptr + rows[:, None] * num_chunks * CHUNK + depth[None, :]
    codes_at = codes_ptr + safe.to(tl.int64)[None, :] * CHUNK + depth[:, None]
    total = tl.zeros([TILE, TILE], tl.float32)
    x_scales_at = x_scales_ptr + rows * (num_chunks if BY_CHUNK else 1)
    x_scale, scale = tl.load(x_scales_at), tl.load(scales_ptr + safe).to(tl.float32)
    for chunk in range(num_chunks):
        x, weight = tl.load(x_at), tl.load(codes_at)
        part = tl.dot(x.to(DOT), weight.to(DOT), input_precision="ieee")
        if BY_CHUNK:
            total += part * x_scale[:, None] * scale[None, :]
            next_chunk = tl.minimum(chunk + 1, num_chunks - 1)
            x_scale = tl.load(x_scales_at + next_chunk)
            scale = tl.load(scales_ptr + next_chunk * num_outputs + safe).to(tl.float32)
        else:
            total += part
        x_at += CHUNK
        codes_at += num_outputs.to(tl.int64) * CHUNK
    if not BY_CHUNK:
        total *= x_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out = out_ptr + tokens.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def matmul(
    x_TK: torch.Tensor, weight: GPUWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `quire.ops.weights.gpu_weights.multiply` with rounded activations: [T, K] to [T,
    N]."""
    (num_tokens, _), (num_outputs, num_inputs) = x_TK.shape, weight.shape
    num_chunks, layout = weight.codes.shape[0], weight.layout
    assert layout.chunk_inputs == CHUNK and layout.group in (0, CHUNK) and x_TK.stride(1) == 1
    assert x_TK.shape[1] == num_inputs
    out_TN = x_TK.new_empty(num_tokens, num_outputs)
    if num_tokens == 0:
        return out_TN
    by_chunk = layout.group == CHUNK
    rounded = x_TK.new_empty(num_tokens, num_chunks * CHUNK, dtype=torch.float8_e4m3fn)
    x_scales = x_TK.new_empty(num_tokens, num_chunks if by_chunk else 1, dtype=torch.float32)
    _round_kernel[(num_tokens,)](
        x_TK,
        rounded,
        x_scales,
        num_inputs,
        num_chunks,
        x_TK.stride(0),
        BY_CHUNK=by_chunk,
        CHUNK=CHUNK,
        CHUNKS=ROUNDED_CHUNKS,
        LARGEST=LARGEST,
    )
    _product_kernel[(triton.cdiv(num_tokens, TILE) * triton.cdiv(num_outputs, TILE),)](
        rounded,
        x_scales,
        weight.codes.view(torch.float8_e4m3fn),
        weight.scales,
        out_TN if bias_N is None else bias_N,
        out_TN,
        num_tokens,
        num_outputs,
        num_chunks,
        BY_CHUNK=by_chunk,
        HAS_BIAS=bias_N is not None,
        DOT=tl.float32 if INTERPRETED else tl.float8e4nv,
        CHUNK=CHUNK,
        TILE=TILE,
        ROW_GROUP=ROW_GROUP,
        num_warps=NUM_WARPS,
        num_stages=stages_that_fit(NUM_STAGES, 2 * TILE * CHUNK, x_TK.device),
    )
    return out_TN


# ---- configurations compiled ahead of time ---------------------------------------------------

_TYPES = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "x_scales_ptr": "*fp32"}
_TYPES |= dict.fromkeys(("num_tokens", "num_outputs", "num_inputs", "num_chunks", "x_row"), "i32")
_TYPES |= dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), "*bf16")


def _config(kernel: Any, constants: dict[str, Any], types: dict[str, str], **rest: Any) -> Config:
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: (_TYPES | types)[name] for name in names}
    divisible = [name for name in names if name in ("num_outputs", "num_inputs", "x_row")]
    return Config(kernel, signature, constants, divisible=tuple(divisible), **rest)


def _configs(by_chunk: bool, has_bias: bool) -> list[Config]:
    both: dict[str, Any] = {"BY_CHUNK": by_chunk, "CHUNK": CHUNK}
    rounding = both | {"CHUNKS": ROUNDED_CHUNKS, "LARGEST": LARGEST}
    product = both | {
        "HAS_BIAS": has_bias,
        "DOT": tl.float8e4nv,
        "TILE": TILE,
        "ROW_GROUP": ROW_GROUP,
    }
    launch = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES, "needs_wgmma": True}
    return [
        _config(_round_kernel, rounding, {}),
        _config(_product_kernel, product, {"x_ptr": "*fp8e4nv"}, **launch),
    ]


CONFIGS = [*_configs(False, False), *_configs(True, True)]
