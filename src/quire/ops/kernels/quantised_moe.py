"""Experts with quantised weights: both products over the tokens of each expert.

Shape legend: T tokens, E experts, C experts of a token, P = T C pairs, D model dim, F feed-forward
dim of an expert, G = 2 F. `quire/ops/weights/gpu_weights.py` describes the weights' memory layout.

Pairs are sorted by expert and cut into tiles of one expert each (moe_sort.py). Then come a product
for gate and up, and the gate as a separate operation. A product scaled by the routing weight and a
sum over each token's experts follow. A few tokens go the same way, in tiles of 16. Nothing is added
atomically. With a fixed order, all numbers of pairs have one tile.

Expected on an H200, not measured: reading the weights of the chosen experts is the limit.
gpt-oss-20b in MXFP4 has 13.2 MB per expert. One token of a layer reads 4 experts, 53 MB (12 us at
4.3 TB/s; five launches take as long). From about 40 tokens on all 32 are read, 423 MB (98 us).
2,048 tokens are 408 GFLOP a layer, 1 ms at half of 790 TFLOP/s.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, dot_dtype, kernel
from quire.ops.kernels.moe import memory_of_parts, sum_of_pairs
from quire.ops.kernels.moe_sort import sort_by_expert, tile_bounds
from quire.ops.kernels.quantised import (
    FEW,
    MANY,
    MORE,
    SOME,
    TILE_OF_FLOAT32,
    Tile,
    config_of,
    constants_of,
    form_of,
    stages_of,
    sums_of_chunks,
)
from quire.ops.weights.gpu_layout import layout_of
from quire.ops.weights.gpu_weights import BITS, GPUWeight

Gate = Callable[[torch.Tensor], torch.Tensor]


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype, is_fixed: bool) -> Tile:
    """Return a tile with so many tokens that most experts fill one or two; with is_fixed, the same
    one for any number of pairs."""
    if dtype.itemsize > 2:
        return TILE_OF_FLOAT32
    if is_fixed:
        return MORE
    average = num_pairs / num_experts
    largest = MANY if average > 2 * MANY.tokens else MORE
    return next((tile for tile in (FEW, SOME) if average <= tile.tokens), largest)


@kernel(do_not_specialize=["max_tiles"])
def _grouped_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    max_tiles,
    num_outputs,
    num_inputs,
    num_chunks,
    num_groups,
    x_row,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PLANES: tl.constexpr,
    DOT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write the products of a tile of pairs.

    Without NUM_CHOSEN: out[pair] = weight[pair] * product(x[index of the pair in the order]). With
    it: out[index of the pair in the order] = product(x[token of the pair]).
    """
    tile, first, last = tile_bounds(tiles_ptr, max_tiles)
    if first >= last:
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    order_at = first + tl.arange(0, BLOCK_M)
    is_row = order_at < last
    pairs = tl.load(order_ptr + tl.minimum(order_at, last - 1))
    rows = pairs // NUM_CHOSEN if NUM_CHOSEN > 0 else order_at
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    # Out-of-range outputs repeat the last one and are not stored; out-of-range rows are not read.
    safe = tl.minimum(outputs, num_outputs - 1)
    depth, words = tl.arange(0, 2 * WORDS), tl.arange(0, WORDS)
    group_at = expert * num_groups * num_outputs
    total = sums_of_chunks(
        x_ptr + rows.to(tl.int64)[None, :] * x_row + depth[:, None],
        is_row,
        codes_ptr + expert * num_chunks * num_outputs * WORDS
        + (safe[:, None] * WORDS + words[None, :]),
        scales_ptr + group_at + safe,
        zeros_ptr + group_at + safe,
        num_outputs,
        num_inputs,
        0,
        num_chunks,
        FORMAT,
        ZEROS,
        GROUP,
        WORDS,
        PLANES,
        DOT,
        IS_EVEN,
        BLOCK_N,
        BLOCK_M,
    )  # fmt: skip
    if HAS_BIAS:
        bias_at = bias_ptr + expert * num_outputs + outputs
        total += tl.load(bias_at, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if NUM_CHOSEN == 0:
        total *= tl.load(weights_ptr + pairs).to(tl.float32)[None, :]
    to = order_at if NUM_CHOSEN > 0 else pairs
    out = out_ptr + to.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


def moe_experts(
    x_TD: torch.Tensor,
    ids_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up: GPUWeight,
    down: GPUWeight,
    gate: Gate,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    has_others: bool = False,
    num_real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `quire.ops.moe.moe_experts`, [T, D], of experts stored in one weight, without waiting
    for the device. gate: makes [P, F] of [P, G]. biases: [E, G] and [E, D]. has_others, num_real:
    see moe.moe_experts."""
    if len(x_TD) == 0:
        return torch.empty_like(x_TD)
    num_experts, num_chosen = down.shape[0], ids_TC.shape[1]
    tile = tile_for(ids_TC.numel(), num_experts, x_TD.dtype, gate_up.is_fixed)
    ids_TC = ids_TC.contiguous()
    order_P, tiles_3M = sort_by_expert(ids_TC, num_experts, tile.tokens, has_others, num_real)
    gate_up_bias, down_bias = biases or (None, None)
    sorted_pairs = order_P, tiles_3M, weights_TC.contiguous()
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    gate_up_PG = _product(x_TD, gate_up, gate_up_bias, sorted_pairs, tile, num_chosen, has_others)
    parts_PD = _product(
        gate(gate_up_PG), down, down_bias, sorted_pairs, tile, has_others=has_others
    )
    return sum_of_pairs(parts_PD, num_chosen)


def _product(
    x: torch.Tensor,
    weight: GPUWeight,
    bias_EN: torch.Tensor | None,
    sorted_pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tile: Tile,
    num_chosen: int = 0,
    has_others: bool = False,
) -> torch.Tensor:
    """Return the products of all pairs with their experts' weights. num_chosen: C if the rows of x
    are tokens. It is 0 if they are pairs in sorted order; results are then weighted and stored at
    their pairs' indices."""
    order_P, tiles_3M, weights_TC = sorted_pairs
    max_tiles, num_outputs = tiles_3M.shape[1], weight.shape[1]
    out = memory_of_parts(x, len(order_P), num_outputs, has_others)
    _grouped_kernel[(triton.cdiv(num_outputs, tile.outputs), max_tiles)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out if bias_EN is None else bias_EN,
        weights_TC,
        order_P,
        tiles_3M,
        out,
        max_tiles,
        num_outputs,
        weight.num_inputs,
        weight.codes.shape[1],
        weight.scales.shape[1],
        x.stride(0),
        **constants_of(weight, dot_dtype(x.dtype)),
        HAS_BIAS=bias_EN is not None,
        NUM_CHOSEN=num_chosen,
        BLOCK_N=tile.outputs,
        BLOCK_M=tile.tokens,
        num_warps=tile.num_warps,
        num_stages=stages_of(tile, weight, x),
    )
    return out


# ---- compiled ahead of time: gpt-oss-20b in MXFP4, Qwen3-30B-A3B in 8 bits --------------------


def _config(format: str, group: int, num_inputs: int, tile: Tile, num_chosen: int) -> Config:
    layout = layout_of(BITS[format], group, num_inputs)
    form = form_of(format, "none", layout, num_inputs, tl.bfloat16)
    constants: dict[str, Any] = form | {"HAS_BIAS": format == "mxfp4", "NUM_CHOSEN": num_chosen}
    constants |= {"BLOCK_N": tile.outputs, "BLOCK_M": tile.tokens}
    types = {"scales_ptr": {"mxfp4": "*u8", "fp8": "*fp32"}.get(format, "*bf16")}
    types |= {"zeros_ptr": types["scales_ptr"], "weights_ptr": "*fp32"}
    types |= {"order_ptr": "*i32", "tiles_ptr": "*i32"}
    return config_of(_grouped_kernel, constants, types, tile)


CONFIGS = [
    *(_config("mxfp4", 32, 2880, tile, chosen) for tile in (FEW, MANY) for chosen in (4, 0)),
    _config("mxfp4", 32, 2880, SOME, 4),
    _config("int8", 128, 2048, MORE, 8),
    _config("int4", 32, 768, FEW, 0),
    _config("fp8", 0, 2048, FEW, 8),
]
