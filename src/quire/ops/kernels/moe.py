"""Mixtures of experts: routing, and the experts' products over tokens sorted by expert.

Shape legend: T tokens, E experts, C experts of a token, P = T C pairs of a token and an expert, D
model dim, F feed-forward dim of an expert, G = 2 F.

`few_experts` takes a few tokens, in two launches. A program computes some outputs of one pair's
expert, then of one token's experts, one after another. `grouped_experts` takes many tokens. Pairs
are sorted by expert and cut into tiles of one expert each (moe_sort.py). Then come a product with
silu(gate) * up, a product scaled by the routing weight, and a sum over each token's experts.
Nothing is added atomically, so equal inputs give equal bits. With a fixed order a token's bits do
not depend on the number of tokens. A few tokens then also use `grouped_experts`, and all numbers of
pairs one tile, FIXED_TILE.

Expected, not measured (H200, Qwen3-30B-A3B in bfloat16): up to about 2,000 tokens, reading the
weights of the chosen experts is the limit. One token reads 75 MB a layer (18 us at 4.3 TB/s, and
three launches), 64 and more read 1.2 GB (0.28 ms). Beyond that the products are the limit: 8,192
tokens are 618 GFLOP a layer, 0.78 ms at 790 TFLOP/s. The sum over experts then takes 0.13 ms to
write and read.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops import gpu
from quire.ops.elementwise import ClampedGate
from quire.ops.kernels.gate import clamped_factors
from quire.ops.kernels.launch import Config, dot_dtype, kernel, next_power_of_2
from quire.ops.kernels.moe_sort import sort_by_expert, tile_bounds

Biases = tuple[torch.Tensor, torch.Tensor]  # of gate and up [E, G], and of down [E, D]

FEW_TOKENS = 4
ROUTED_ROWS = 4
SUM_WIDTH = 1024
FEW_OUTPUTS, FEW_INPUTS = 8, 512  # outputs and inputs of a program's tile of gate and of up
FEW_SUMS, FEW_INNER = 4, 1024  # the same for down


@dataclass(frozen=True)
class Tile:
    """Sizes of the products' tiles: pairs, outputs of gate and of up each, outputs of down,
    inputs."""

    pairs: int
    up: int
    down: int
    inputs: int
    num_warps: int
    num_stages: int

    @property
    def needs_wgmma(self) -> bool:
        return self.pairs >= 64


# By the maximum average number of pairs per expert.
TILES = {
    8: Tile(16, 64, 128, 128, num_warps=4, num_stages=3),
    24: Tile(32, 64, 128, 64, num_warps=4, num_stages=4),
    64: Tile(64, 64, 128, 64, num_warps=4, num_stages=4),
}
LARGEST_TILE = Tile(128, 128, 256, 64, num_warps=8, num_stages=3)
FIXED_TILE = TILES[64]  # uses Hopper's matrix instruction even for one token
TILE_OF_FLOAT32 = Tile(16, 32, 32, 32, num_warps=4, num_stages=2)


def tile_for(
    num_pairs: int, num_experts: int, dtype: torch.dtype, takes_largest: bool = True
) -> Tile:
    """Return a tile so large that most experts fill one or two. takes_largest: whether the largest
    tile's sums fit into registers, as with the matrix instructions of Hopper and data-centre
    Blackwell."""
    if dtype.itemsize > 2:
        return TILE_OF_FLOAT32
    average = num_pairs / num_experts
    largest = LARGEST_TILE if takes_largest else TILES[max(TILES)]
    return next((tile for max_average, tile in TILES.items() if average <= max_average), largest)


# ---- routing ---------------------------------------------------------------------------------


@kernel(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    logits_row,
    NUM_CHOSEN: tl.constexpr,
    NORMALISES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, slots = tl.arange(0, WIDTH)[None, :], tl.arange(0, SLOTS)[None, :]
    inside = rows[:, None] < num_tokens
    is_expert = at < num_experts
    places = logits_ptr + rows[:, None] * logits_row + at
    logits = tl.load(places, mask=inside & is_expert, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - largest[:, None]), axis=1)
    ids = tl.zeros([ROWS, SLOTS], tl.int32)
    weights = tl.zeros([ROWS, SLOTS], tl.float32)
    is_left = (rows[:, None] >= 0) & is_expert
    for i in tl.static_range(NUM_CHOSEN):
        top = tl.max(tl.where(is_left, logits, float("-inf")), axis=1)
        is_top = is_left & (logits == top[:, None])
        # The first of equal logits; any expert if NaN makes every comparison false.
        chosen = tl.min(tl.where(is_top, at, num_experts - 1), axis=1)
        ids = tl.where(slots == i, chosen[:, None], ids)
        weights = tl.where(slots == i, tl.exp(top - largest)[:, None], weights)
        is_left = is_left & (at != chosen[:, None])
    divisor = tl.sum(weights, axis=1) if NORMALISES else total
    # A NaN among a token's logits makes all its weights NaN.
    weights = weights / (divisor + total * 0.0)[:, None]
    out = rows[:, None] * NUM_CHOSEN + slots
    is_slot = inside & (slots < NUM_CHOSEN)
    tl.store(ids_ptr + out, ids, mask=is_slot)
    tl.store(weights_ptr + out, weights, mask=is_slot)


def moe_route(
    logits_TE: torch.Tensor, num_chosen: int, normalises: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quire.ops.moe.moe_route` for logits [T, E]: ids, int32 [T, C], and weights, float32
    [T, C]."""
    num_tokens, num_experts = logits_TE.shape
    ids_TC = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits_TE.device)
    weights_TC = torch.empty_like(ids_TC, dtype=torch.float32)
    if num_tokens:
        logits_TE = _rows(logits_TE)
        _route_kernel[(triton.cdiv(num_tokens, ROUTED_ROWS),)](
            logits_TE,
            ids_TC,
            weights_TC,
            num_tokens,
            num_experts,
            logits_TE.stride(0),
            NUM_CHOSEN=num_chosen,
            NORMALISES=normalises,
            ROWS=ROUTED_ROWS,
            WIDTH=next_power_of_2(num_experts),
            SLOTS=next_power_of_2(num_chosen),
            num_warps=ROUTED_ROWS,
        )
    return ids_TC, weights_TC


# ---- many tokens -----------------------------------------------------------------------------


@triton.jit
def _gated(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return silu(gate) * up, or `ops.elementwise.clamped_gate` if there is a limit."""
    if LIMIT > 0.0:
        gate, up = clamped_factors(gate, up, ALPHA, LIMIT)
        return gate * up
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel(do_not_specialize=["max_tiles"])
def _up_kernel(
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    inner_ptr,
    max_tiles,
    size,
    inner_size,
    x_row,
    NUM_CHOSEN: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write silu(gate) * up of a tile's pairs to inner, at each pair's index in the order."""
    tile, first, last = tile_bounds(tiles_ptr, max_tiles)
    if first >= last:
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    places = first + tl.arange(0, BLOCK_M)
    # Out-of-range rows and columns repeat a valid one and are not stored.
    pairs = tl.load(order_ptr + tl.minimum(places, last - 1))
    tokens = (pairs // NUM_CHOSEN).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert * 2 * inner_size + tl.minimum(columns, inner_size - 1)
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + tokens[:, None] * x_row + depth[None, :]
    gate_at = gate_up_ptr + rows[None, :] * size + depth[:, None]
    to_up = inner_size * size
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        if IS_EVEN:
            x, weight = tl.load(x_at), tl.load(gate_at)
            weight_up = tl.load(gate_at + to_up)
        else:
            left = size - start
            x = tl.load(x_at, mask=depth[None, :] < left, other=0.0)
            weight = tl.load(gate_at, mask=depth[:, None] < left, other=0.0)
            weight_up = tl.load(gate_at + to_up, mask=depth[:, None] < left, other=0.0)
        x = x.to(DOT_DTYPE)
        gate = tl.dot(x, weight.to(DOT_DTYPE), gate, input_precision="ieee")
        up = tl.dot(x, weight_up.to(DOT_DTYPE), up, input_precision="ieee")
        x_at += BLOCK_K
        gate_at += BLOCK_K
    if HAS_BIAS:
        gate += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + rows + inner_size).to(tl.float32)[None, :]
    values = _gated(gate, up, ALPHA, LIMIT)
    out = inner_ptr + places.to(tl.int64)[:, None] * inner_size + columns[None, :]
    inside = (places < last)[:, None] & (columns < inner_size)[None, :]
    tl.store(out, values.to(inner_ptr.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["max_tiles"])
def _down_kernel(
    inner_ptr,
    down_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    max_tiles,
    size,
    inner_size,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write out[pair] = weight[pair] * down(inner[index of the pair in the order])."""
    tile, first, last = tile_bounds(tiles_ptr, max_tiles)
    if first >= last:
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    places = first + tl.arange(0, BLOCK_M)
    sources = tl.minimum(places, last - 1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert * size + tl.minimum(columns, size - 1)
    depth = tl.arange(0, BLOCK_K)
    inner_at = inner_ptr + sources.to(tl.int64)[:, None] * inner_size + depth[None, :]
    down_at = down_ptr + rows[None, :] * inner_size + depth[:, None]
    values = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner_size, BLOCK_K):
        if IS_EVEN:
            inner, weight = tl.load(inner_at), tl.load(down_at)
        else:
            left = inner_size - start
            inner = tl.load(inner_at, mask=depth[None, :] < left, other=0.0)
            weight = tl.load(down_at, mask=depth[:, None] < left, other=0.0)
        values = tl.dot(inner.to(DOT_DTYPE), weight.to(DOT_DTYPE), values, input_precision="ieee")
        inner_at += BLOCK_K
        down_at += BLOCK_K
    if HAS_BIAS:
        values += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + sources)
    values *= tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    out = out_ptr + pairs.to(tl.int64)[:, None] * size + columns[None, :]
    inside = (places < last)[:, None] & (columns < size)[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=inside)


@kernel()
def _sum_kernel(parts_ptr, out_ptr, size, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr):
    """Write to out[token] the sum of its experts' parts, in the order of its ids."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        places = parts_ptr + (token * NUM_CHOSEN + i) * size + at
        total += tl.load(places, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def grouped_experts(
    x_TD: torch.Tensor,
    ids_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    tile: Tile,
    biases: Biases | None = None,
    clamped: ClampedGate | None = None,
    has_others: bool = False,
    num_real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `moe_experts`, [T, D], by products over the tokens of each expert."""
    (num_experts, size, inner_size), num_chosen = down_EDF.shape, ids_TC.shape[1]
    num_pairs = ids_TC.numel()
    order_P, tiles_3M = sort_by_expert(ids_TC, num_experts, tile.pairs, has_others, num_real)
    max_tiles = tiles_3M.shape[1]
    inner_PF = x_TD.new_empty(num_pairs, inner_size)
    parts_PD = memory_of_parts(x_TD, num_pairs, size, has_others)
    shared = {
        "DOT_DTYPE": dot_dtype(x_TD.dtype),
        "BLOCK_M": tile.pairs,
        "BLOCK_K": tile.inputs,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    gate_up_bias, down_bias = biases or (gate_up_EGD, down_EDF)  # placeholders are not read
    _up_kernel[(triton.cdiv(inner_size, tile.up), max_tiles)](
        x_TD, gate_up_EGD, gate_up_bias, order_P, tiles_3M, inner_PF,
        max_tiles, size, inner_size, x_TD.stride(0), NUM_CHOSEN=num_chosen, BLOCK_N=tile.up,
        IS_EVEN=size % tile.inputs == 0, HAS_BIAS=bool(biases), **_gate_of(clamped), **shared,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(size, tile.down), max_tiles)](
        inner_PF, down_EDF, down_bias, weights_TC, order_P, tiles_3M, parts_PD,
        max_tiles, size, inner_size, BLOCK_N=tile.down,
        IS_EVEN=inner_size % tile.inputs == 0, HAS_BIAS=bool(biases), **shared,
    )  # fmt: skip
    return sum_of_pairs(parts_PD, num_chosen)


def memory_of_parts(x: torch.Tensor, num_pairs: int, size: int, has_others: bool) -> torch.Tensor:
    """Allocate experts' outputs for all pairs, [P, size]. They start as zeros if other ranks hold
    some of the experts."""
    return x.new_zeros(num_pairs, size) if has_others else x.new_empty(num_pairs, size)


def _gate_of(clamped: ClampedGate | None) -> dict[str, float]:
    """Return the constants of `_gated`; a limit of 0 selects SiLU."""
    if clamped is None:
        return {"ALPHA": 1.0, "LIMIT": 0.0}
    return {"ALPHA": clamped.alpha, "LIMIT": clamped.limit}


def sum_of_pairs(parts_PD: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Sum the outputs of each token's experts, [P, D] to [T, D], in the order of the token's expert
    ids."""
    num_pairs, size = parts_PD.shape
    out_TD = parts_PD.new_empty(num_pairs // num_chosen, size)
    _sum_kernel[(len(out_TD), triton.cdiv(size, SUM_WIDTH))](
        parts_PD, out_TD, size, NUM_CHOSEN=num_chosen, WIDTH=SUM_WIDTH
    )
    return out_TD


# ---- a few tokens ----------------------------------------------------------------------------


@kernel()
def _few_up_kernel(
    x_ptr,
    ids_ptr,
    gate_up_ptr,
    bias_ptr,
    num_real_ptr,
    inner_ptr,
    x_row,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    """Write BLOCK_N outputs of silu(gate) * up to inner[pair]. NUM_EXPERTS: number of this rank's
    experts if other ranks have some, else 0. For pairs of other ranks, and with HAS_PADDING of all
    but the first num_real tokens, no weights are read."""
    pair = tl.program_id(1)
    if HAS_PADDING:  # noqa: SIM102 (the condition is compiled away)
        if pair // NUM_CHOSEN >= tl.load(num_real_ptr):
            return
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    x_at = x_ptr + (pair // NUM_CHOSEN).to(tl.int64) * x_row
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_own = columns < INNER
    if NUM_EXPERTS > 0:
        is_own = is_own & (expert < NUM_EXPERTS)
    inside = is_own[:, None]
    gate_at = gate_up_ptr + (expert * 2 * INNER + columns)[:, None] * SIZE
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        mask = inside & (depth < SIZE)[None, :]
        x = tl.load(x_at + depth, mask=depth < SIZE, other=0.0).to(tl.float32)[None, :]
        places = gate_at + depth[None, :]
        gate += tl.load(places, mask=mask, other=0.0).to(tl.float32) * x
        up += tl.load(places + INNER * SIZE, mask=mask, other=0.0).to(tl.float32) * x
    gate_N, up_N = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if HAS_BIAS:
        bias_at = bias_ptr + expert * 2 * INNER + columns
        gate_N += tl.load(bias_at, mask=is_own, other=0.0).to(tl.float32)
        up_N += tl.load(bias_at + INNER, mask=is_own, other=0.0).to(tl.float32)
    values = _gated(gate_N, up_N, ALPHA, LIMIT)
    out = inner_ptr + pair.to(tl.int64) * INNER + columns
    tl.store(out, values.to(inner_ptr.dtype.element_ty), mask=columns < INNER)


@kernel()
def _few_down_kernel(
    inner_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    bias_ptr,
    num_real_ptr,
    out_ptr,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):
    """Write BLOCK_N outputs of the sum over a token's experts of weight * down(inner) to
    out[token]."""
    token = tl.program_id(1)
    if HAS_PADDING:  # noqa: SIM102 (the condition is compiled away)
        if token >= tl.load(num_real_ptr):
            return
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    bias_N = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + i
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        share = tl.load(weights_ptr + pair).to(tl.float32)
        is_own = columns < SIZE
        if NUM_EXPERTS > 0:
            is_own = is_own & (expert < NUM_EXPERTS)
            share = tl.where(expert < NUM_EXPERTS, share, 0.0)
        if HAS_BIAS:
            bias_at = bias_ptr + expert * SIZE + columns
            bias_N += share * tl.load(bias_at, mask=is_own, other=0.0).to(tl.float32)
        down_at = down_ptr + (expert * SIZE + columns)[:, None] * INNER
        inner_at = inner_ptr + pair.to(tl.int64) * INNER
        for start in tl.static_range(0, INNER, BLOCK_K):
            depth = start + tl.arange(0, BLOCK_K)
            is_input = depth < INNER
            x = tl.load(inner_at + depth, mask=is_input, other=0.0).to(tl.float32) * share
            mask = is_own[:, None] & is_input[None, :]
            weight = tl.load(down_at + depth[None, :], mask=mask, other=0.0)
            total += weight.to(tl.float32) * x[None, :]
    out = out_ptr + token.to(tl.int64) * SIZE + columns
    tl.store(
        out, (tl.sum(total, axis=1) + bias_N).to(out_ptr.dtype.element_ty), mask=columns < SIZE
    )


def few_experts(
    x_TD: torch.Tensor,
    ids_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    biases: Biases | None = None,
    clamped: ClampedGate | None = None,
    has_others: bool = False,
    num_real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `moe_experts`, [T, D], without sorting: the weights of its experts are read for each
    token separately."""
    (_, size, inner_size), num_chosen = down_EDF.shape, ids_TC.shape[1]
    inner_PF = x_TD.new_empty(ids_TC.numel(), inner_size)
    out_TD = x_TD.new_empty(len(x_TD), size)
    gate_up_bias, down_bias = biases or (gate_up_EGD, down_EDF)
    shared = {"NUM_CHOSEN": num_chosen, "SIZE": size, "INNER": inner_size}
    shared |= {"HAS_BIAS": bool(biases), "NUM_EXPERTS": len(down_EDF) if has_others else 0}
    shared |= {"HAS_PADDING": num_real is not None}
    num_real = ids_TC if num_real is None else num_real  # a placeholder is not read
    _few_up_kernel[(triton.cdiv(inner_size, FEW_OUTPUTS), ids_TC.numel())](
        x_TD, ids_TC, gate_up_EGD, gate_up_bias, num_real, inner_PF, x_TD.stride(0),
        BLOCK_N=FEW_OUTPUTS, BLOCK_K=FEW_INPUTS, **_gate_of(clamped), **shared,
    )  # fmt: skip
    _few_down_kernel[(triton.cdiv(size, FEW_SUMS), len(x_TD))](
        inner_PF, ids_TC, weights_TC, down_EDF, down_bias, num_real, out_TD,
        BLOCK_N=FEW_SUMS, BLOCK_K=FEW_INNER, **shared,
    )  # fmt: skip
    return out_TD


def moe_experts(
    x_TD: torch.Tensor,
    ids_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    is_fixed: bool = False,
    biases: Biases | None = None,
    clamped: ClampedGate | None = None,
    has_others: bool = False,
    num_real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `quire.ops.moe.moe_experts`, [T, D], of experts stored in one tensor, without waiting
    for the device.

    is_fixed: whether the order of sums is the same for any number of tokens. has_others: whether an
    id of E stands for experts of other ranks. num_real: int32 [1], the number of tokens that are
    not padding; the results of the others have any values.
    """
    if len(x_TD) == 0:
        return torch.empty_like(x_TD)
    assert gate_up_EGD.is_contiguous() and down_EDF.is_contiguous()
    arguments = (_rows(x_TD), ids_TC.contiguous(), weights_TC.contiguous(), gate_up_EGD, down_EDF)
    if is_fixed:
        tile = TILE_OF_FLOAT32 if x_TD.dtype.itemsize > 2 else FIXED_TILE
        return grouped_experts(*arguments, tile, biases, clamped, has_others, num_real)
    if len(x_TD) <= FEW_TOKENS:
        return few_experts(*arguments, biases, clamped, has_others, num_real)
    found = gpu.gpu_of(x_TD.device)
    takes_largest = found is not None and found.capability[0] in (9, 10)
    tile = tile_for(ids_TC.numel(), len(down_EDF), x_TD.dtype, takes_largest)
    return grouped_experts(*arguments, tile, biases, clamped, has_others, num_real)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with contiguous columns; rows may have any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- compiled ahead of time: sizes of Qwen3-30B-A3B and some of gpt-oss, in bfloat16 -----------

_INTEGERS = ("ids_ptr", "order_ptr", "tiles_ptr", "num_real_ptr")
_POINTERS = dict.fromkeys(_INTEGERS, "*i32") | {"weights_ptr": "*fp32"}
_DIVISIBLE = ("num_experts", "logits_row", "size", "inner_size", "x_row")


def _config(
    kernel: Any, constants: dict[str, Any], num_warps: int = 4, num_stages: int = 2, **rest: Any
) -> Config:
    names = [name for name in kernel.arg_names if name not in constants]
    others = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    signature = others | {name: _POINTERS[name] for name in names if name in _POINTERS}
    divisible = tuple(name for name in names if name in _DIVISIBLE)
    return Config(kernel, signature, constants, num_warps, num_stages, divisible, **rest)


def _product_configs(tile: Tile, clamped: ClampedGate | None = None) -> list[Config]:
    shared = {"DOT_DTYPE": tl.bfloat16, "BLOCK_M": tile.pairs, "BLOCK_K": tile.inputs}
    shared |= {"IS_EVEN": clamped is None, "HAS_BIAS": clamped is not None}
    up = {"NUM_CHOSEN": 8, "BLOCK_N": tile.up} | _gate_of(clamped)
    launch = (tile.num_warps, tile.num_stages)
    needs = {"needs_wgmma": tile.needs_wgmma}
    return [
        _config(_up_kernel, shared | up, *launch, **needs),
        _config(_down_kernel, shared | {"BLOCK_N": tile.down}, *launch, **needs),
    ]


OSS = ClampedGate(1.702, 7.0)
_FEW = {"NUM_CHOSEN": 8, "SIZE": 2048, "INNER": 768, "HAS_BIAS": False, "NUM_EXPERTS": 0}
_FEW_OSS = {"NUM_CHOSEN": 4, "SIZE": 2880, "INNER": 2880, "HAS_BIAS": True, "NUM_EXPERTS": 0}
_WHOLE, _PADDED = {"HAS_PADDING": False}, {"HAS_PADDING": True}
_UP, _DOWN = (
    {"BLOCK_N": FEW_OUTPUTS, "BLOCK_K": FEW_INPUTS},
    {"BLOCK_N": FEW_SUMS, "BLOCK_K": FEW_INNER},
)
_ROUTE = {"NUM_CHOSEN": 8, "NORMALISES": True, "ROWS": ROUTED_ROWS, "WIDTH": 128, "SLOTS": 8}

CONFIGS = [
    _config(_route_kernel, _ROUTE, ROUTED_ROWS),
    *(config for tile in (*TILES.values(), LARGEST_TILE) for config in _product_configs(tile)),
    _config(_sum_kernel, {"NUM_CHOSEN": 8, "WIDTH": SUM_WIDTH}),
    *_product_configs(LARGEST_TILE, OSS),
    _config(_few_up_kernel, _FEW | _WHOLE | _UP | _gate_of(None)),
    _config(_few_down_kernel, _FEW | _WHOLE | _DOWN),
    _config(_few_up_kernel, _FEW | _PADDED | {"NUM_EXPERTS": 64} | _UP | _gate_of(None)),
    _config(_few_down_kernel, _FEW | _PADDED | {"NUM_EXPERTS": 64} | _DOWN),
    _config(_few_up_kernel, _FEW_OSS | _PADDED | _UP | _gate_of(OSS)),
    _config(_few_down_kernel, _FEW_OSS | _PADDED | _DOWN),
]
