"""Look up rows of a quantised weight, such as an embedding that is tied to a quantised head.

Shape legend: U looked up rows, K inputs of the head. A program takes a row and some of its chunks.

Expected on an H200, not measured: the time of a launch for a few rows. 2,048 rows of K = 4,096 read
9 MB and write 17 MB: 6 us at 4.3 TB/s.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel
from quire.ops.kernels.quantised import factor, numbers
from quire.ops.weights.gpu_weights import GPUWeight

CHUNKS = 8  # chunks of a program


@kernel()
def _rows_kernel(
    ids_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    num_chunks,
    FORMAT: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    PLANE: tl.constexpr = 2 * WORDS
    row = tl.program_id(0).to(tl.int64)
    output = tl.load(ids_ptr + row).to(tl.int64)
    # Never read outside the weight: a wrong id is the caller's bug and gives zeros.
    is_known = (output >= 0) & (output < num_outputs)
    chunks = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    inside = is_known & (chunks < num_chunks)
    offsets = (chunks.to(tl.int64) * num_outputs + output) * WORDS
    words_at = codes_ptr + offsets[:, None] + tl.arange(0, WORDS)[None, :]
    words = tl.load(words_at, mask=inside[:, None], other=0).to(tl.uint32, bitcast=True)
    for plane in tl.static_range(PLANES):
        first = chunks * (PLANES * PLANE) + plane * PLANE
        group = first // GROUP if GROUP > 0 else 0 * first
        factor_at = group.to(tl.int64) * num_outputs + output
        scale = tl.load(scales_ptr + factor_at, mask=inside, other=0)
        values = numbers(words, plane * (16 // PLANES), FORMAT, tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + factor_at, mask=inside, other=0)
            values -= zero.to(tl.float32)[:, None]
        values *= tl.where(inside, factor(scale, FORMAT), 0.0)[:, None]
        at = first[:, None] + tl.arange(0, PLANE)[None, :]
        mask = (at < num_inputs) & (chunks < num_chunks)[:, None]
        tl.store(out_ptr + row * num_inputs + at, values.to(out_ptr.dtype.element_ty), mask=mask)


def look_up(ids_U: torch.Tensor, weight: GPUWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows [U, K] of these outputs in `dtype`. ids_U: int64 or int32."""
    num_chunks, num_outputs, _ = weight.codes.shape
    out_UK = torch.empty(len(ids_U), weight.num_inputs, dtype=dtype, device=weight.codes.device)
    if out_UK.numel():
        _rows_kernel[(len(ids_U), triton.cdiv(num_chunks, CHUNKS))](
            ids_U.to(out_UK.device).contiguous(),
            weight.codes,
            weight.scales,
            weight.scales if weight.zeros is None else weight.zeros,
            out_UK,
            num_outputs,
            weight.num_inputs,
            num_chunks,
            FORMAT=weight.format,
            HAS_ZEROS=weight.zeros is not None,
            GROUP=weight.layout.group,
            WORDS=weight.layout.words,
            PLANES=weight.layout.planes,
            CHUNKS=CHUNKS,
        )
    if weight.order is None:
        return out_UK
    return torch.empty_like(out_UK).index_copy_(1, weight.order, out_UK)


def _config(format: str, group: int, scales: str) -> Config:
    constants: dict[str, Any] = {"FORMAT": format, "HAS_ZEROS": False, "GROUP": group}
    constants |= {"WORDS": 32, "PLANES": 2}
    types = {"ids_ptr": "*i64", "codes_ptr": "*i32", "out_ptr": "*bf16"}
    types |= dict.fromkeys(("scales_ptr", "zeros_ptr"), scales)
    types |= dict.fromkeys(("num_outputs", "num_inputs", "num_chunks"), "i32")
    divisible = ("num_outputs", "num_inputs")
    return Config(_rows_kernel, types, constants | {"CHUNKS": CHUNKS}, divisible=divisible)


CONFIGS = [_config("int8", 128, "*bf16"), _config("fp8", 0, "*fp32")]
