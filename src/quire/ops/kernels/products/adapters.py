"""Low-rank additions to a product's outputs on a GPU (LoRA, Hu et al. 2021, section 4.1).

For the tokens of each adapter, out += scale (x A^T) B^T.

Shape legend: T tokens, S row slots, E slots for adapters, K inputs, O outputs of a layer, N outputs
of a part, R rank of a part, M maximum number of tiles.

    once a step    slots of tokens -> sort by slot, cut into tiles of one slot (moe_sort.py)
    once a layer   shrink: inner = x A^T          expand: out += scale inner B^T

A layer that merges modules has up to PARTS parts, one after another. A table holds the place in
memory, the rank and the outputs of each part. So one launch serves any mix of adapters, each with
its own rank. The grid has room for the maximum rank. Programs of tiles without tokens, and of ranks
that the adapter does not have, return at once. So a recorded launch is right for every later step.

    table  int64 [E, layers, parts, FIELDS]   offset of A [R, K], of B^T [R, N], R, first output, N,
                                              bits of the scale
    memory         [E, capacity]              matrices; rows begin at multiples of ALIGNED numbers

With few tokens several programs share the inputs of a tile, and the sums of all follow in the
second launch, in their order. Nothing is added atomically. With a fixed order a token's bits do not
depend on the other tokens.

Expected on an H200, not measured: two launches a layer, 2 us each. Reading adapters of rank 16 for
a layer of 4,096 x 4,096 takes 0.06 us each.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import DTYPES, Config, dot_dtype, kernel
from quire.ops.kernels.moe_sort import sort_by_expert, tile_bounds

ALIGNED = 16  # numbers: every row of a matrix begins at a multiple of them
FIELDS = 6
TOKENS = 256  # that a program of `slots_of_tokens` writes at a time
FEW_TOKENS = 256
MAX_SPLITS, SPLIT_INPUTS = 8, 512  # programs that share a tile's inputs; inputs of one at least


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's tiles: tokens, inputs and outputs."""

    tokens: int
    inputs: int
    outputs: int
    num_warps: int = 4
    num_stages: int = 3


FEW, MANY = Tile(16, 128, 128), Tile(64, 64, 128)
FEW_FLOAT32, MANY_FLOAT32 = Tile(16, 64, 64), Tile(64, 32, 32)


@dataclass(frozen=True)
class TokenGroups:
    """Tokens of a step by adapter. order: int32 [T]. tiles: int32 [3, M]; see moe_sort.py."""

    order_T: torch.Tensor
    tiles_3M: torch.Tensor
    is_few: bool


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer as the kernels find its parts. at: its first number in a slot's part of the table.
    is_aligned: whether every part's first output is a multiple of ALIGNED."""

    at: int
    num_parts: int
    max_rank: int
    is_aligned: bool = True


@kernel(do_not_specialize=["num_rows", "num_tokens"])
def _slots_kernel(
    rows_ptr, starts_ptr, slots_ptr, num_rows, num_tokens, NO_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the slot of each token of a row; the last program does it for padding."""
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.load(starts_ptr + row)
    end = tl.load(starts_ptr + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows_ptr + row, mask=is_row, other=-1)
    slot = tl.where(slot < 0, NO_SLOT, slot)
    for first in range(start, tl.minimum(end, num_tokens), BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.zeros([BLOCK], tl.int32) + slot
        tl.store(slots_ptr + at, values, mask=(at < end) & (at < num_tokens))


def group_tokens(
    rows_S: torch.Tensor,
    starts_S1: torch.Tensor,
    num_tokens: int,
    num_slots: int,
    *,
    is_fixed: bool = False,
) -> TokenGroups:
    """Group a step's tokens by the slot of their row's adapter. rows: int32, -1 without an adapter;
    it may have more rows. starts: int32 [S + 1]; tokens after the last row's are padding."""
    num_rows, is_few = len(starts_S1) - 1, num_tokens <= FEW_TOKENS and not is_fixed
    assert len(rows_S) >= num_rows, f"{num_rows} rows, but room for {len(rows_S)}"
    slots_T1 = torch.empty(num_tokens, 1, dtype=torch.int32, device=rows_S.device)
    _slots_kernel[(num_rows + 1,)](
        rows_S, starts_S1, slots_T1, num_rows, num_tokens, NO_SLOT=num_slots, BLOCK=TOKENS
    )
    tile_tokens = (FEW if is_few else MANY).tokens
    return TokenGroups(*sort_by_expert(slots_T1, num_slots, tile_tokens, has_others=True), is_few)


@kernel(do_not_specialize=["num_tokens", "max_tiles"])
def _shrink_kernel(
    x_ptr,
    memory_ptr,
    table_ptr,
    order_ptr,
    tiles_ptr,
    inner_ptr,
    num_tokens,
    max_tiles,
    num_inputs,
    x_row,
    capacity,
    table_row,
    layer_at,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Write some ranks of x A^T of a tile's tokens, over a split's inputs, to inner[split, token's
    index in the order, part RANKS + rank]."""
    tile, first, last = tile_bounds(tiles_ptr, max_tiles)
    if first >= last:
        return
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    part, begin = tl.program_id(0) * BLOCK_R // RANKS, tl.program_id(0) * BLOCK_R % RANKS
    entry_ptr = table_ptr + slot * table_row + layer_at + part * FIELDS
    rank = tl.load(entry_ptr + 2)
    if begin >= rank:
        return
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    places = first + tl.arange(0, BLOCK_M)
    tokens = tl.load(order_ptr + tl.minimum(places, last - 1)).to(tl.int64)
    ranks = begin + tl.arange(0, BLOCK_R)
    row = (num_inputs + ALIGNED - 1) // ALIGNED * ALIGNED
    down_ptr = memory_ptr + tl.multiple_of(slot * capacity + tl.load(entry_ptr), ALIGNED)
    down_ptr += tl.minimum(ranks, rank - 1)[None, :] * row
    x_ptr += tokens[:, None] * x_row
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    steps = tl.cdiv(tl.cdiv(num_inputs, BLOCK_K), splits)
    for step in range(split * steps, (split + 1) * steps):
        depth = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            x = tl.load(x_ptr + depth[None, :])
            down = tl.load(down_ptr + depth[:, None])
        else:
            x = tl.load(x_ptr + depth[None, :], mask=depth[None, :] < num_inputs, other=0.0)
            down = tl.load(down_ptr + depth[:, None], mask=depth[:, None] < num_inputs, other=0.0)
        total = tl.dot(x.to(DOT), down.to(DOT), total, input_precision="ieee")
    out_ptr = inner_ptr + (split * num_tokens + places).to(tl.int64)[:, None] * WIDTH
    mask = (places < last)[:, None] & (ranks < rank)[None, :]
    tl.store(out_ptr + part * RANKS + ranks[None, :], total, mask=mask)


@kernel(do_not_specialize=["num_tokens", "max_tiles"])
def _expand_kernel(
    inner_ptr,
    memory_ptr,
    table_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    num_tokens,
    max_tiles,
    out_row,
    capacity,
    table_row,
    layer_at,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add scale inner B^T to BLOCK_N outputs of a part, for a tile's tokens."""
    tile, first, last = tile_bounds(tiles_ptr, max_tiles)
    if first >= last:
        return
    slot = tl.load(tiles_ptr + tile).to(tl.int64)
    entry_ptr = table_ptr + slot * table_row + layer_at
    # The blocks of all parts follow one another.
    block, part = tl.program_id(0).to(tl.int64), -1
    begin = block * 0
    for p in tl.static_range(PARTS):
        num_blocks = tl.cdiv(tl.load(entry_ptr + p * FIELDS + 4), BLOCK_N)
        is_here = (block >= 0) & (block < num_blocks)
        part = tl.where(is_here, p, part)
        begin = tl.where(is_here, block * BLOCK_N, begin)
        block -= num_blocks
    if part < 0:
        return
    entry_ptr += part * FIELDS
    rank, num_outputs = tl.load(entry_ptr + 2), tl.load(entry_ptr + 4)
    scale = tl.load(entry_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
    places = first + tl.arange(0, BLOCK_M)
    is_token = places < last
    columns = tl.multiple_of(begin, BLOCK_N) + tl.arange(0, BLOCK_N)
    is_column = columns < num_outputs
    row = (num_outputs + ALIGNED - 1) // ALIGNED * ALIGNED
    up_ptr = memory_ptr + tl.multiple_of(slot * capacity + tl.load(entry_ptr + 1), ALIGNED)
    up_ptr += columns[None, :]
    inner_ptr += places.to(tl.int64)[:, None] * (PARTS * RANKS) + part * RANKS
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        is_inner = is_token[:, None] & (ranks < rank)[None, :]
        inner = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for split in tl.static_range(SPLITS):
            at = inner_ptr + (num_tokens * split).to(tl.int64) * (PARTS * RANKS) + ranks[None, :]
            inner += tl.load(at, mask=is_inner, other=0.0)
        mask = (ranks < rank)[:, None] & is_column[None, :]
        up = tl.load(up_ptr + ranks.to(tl.int64)[:, None] * row, mask=mask, other=0.0)
        total = tl.dot((inner * scale).to(DOT), up.to(DOT), total, input_precision="ieee")
    tokens = tl.load(order_ptr + tl.minimum(places, last - 1)).to(tl.int64)
    out_ptr += tl.multiple_of(tl.load(entry_ptr + 3), FIRST)
    out_at = out_ptr + tokens[:, None] * out_row + columns[None, :]
    mask = is_token[:, None] & is_column[None, :]
    before = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, (before + total).to(out_ptr.dtype.element_ty), mask=mask)


def add(
    out_TO: torch.Tensor,
    x_TK: torch.Tensor,
    groups: TokenGroups,
    memory_EC: torch.Tensor,
    table_EN: torch.Tensor,
    layer: AdaptedLayer,
) -> None:
    """Add the adapters' change of a layer to the outputs [T, O] of its tokens, for inputs [T, K],
    in two launches. memory: [E, capacity] in x's dtype. table: int64 [E, numbers of a slot]."""
    (num_tokens, num_inputs), num_outputs = x_TK.shape, out_TO.shape[1]
    assert len(groups.order_T) == num_tokens == len(out_TO), "not the tokens of this step"
    assert out_TO.stride(1) == 1 and memory_EC.dtype == x_TK.dtype == out_TO.dtype
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    launch = Launch(x_TK.dtype, groups.is_few, num_inputs, layer)
    max_tiles, tile = groups.tiles_3M.shape[1], launch.tile
    width = layer.num_parts * launch.ranks
    inner = torch.empty(launch.splits, num_tokens, width, dtype=torch.float32, device=x_TK.device)
    places = memory_EC, table_EN, groups.order_T, groups.tiles_3M
    table = memory_EC.stride(0), table_EN.stride(0), layer.at
    dot = {"DOT": dot_dtype(x_TK.dtype)}
    _shrink_kernel[(width // launch.block_ranks, max_tiles, launch.splits)](
        x_TK, *places, inner, num_tokens, max_tiles, num_inputs, x_TK.stride(0), *table,
        **launch.shrink, **dot, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _expand_kernel[(launch.num_blocks(num_outputs), max_tiles)](
        inner, *places, out_TO, num_tokens, max_tiles, out_TO.stride(0), *table,
        **launch.expand, **dot, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Both launches of a layer. is_few: whether the step has few tokens."""

    dtype: torch.dtype
    is_few: bool
    num_inputs: int
    layer: AdaptedLayer

    @property
    def tile(self) -> Tile:
        if self.dtype.itemsize > 2:
            return FEW_FLOAT32 if self.is_few else MANY_FLOAT32
        return FEW if self.is_few else MANY

    @property
    def splits(self) -> int:
        """Return the number of programs that share a tile's inputs."""
        max_splits = MAX_SPLITS if self.is_few else 1
        return max(1, min(max_splits, self.num_inputs // SPLIT_INPUTS))

    @property
    def block_ranks(self) -> int:
        """Return the number of ranks that a program computes at once."""
        return 16 if self.layer.max_rank <= 16 else 32

    @property
    def ranks(self) -> int:
        """Return the number of ranks of a part for which there is room."""
        return triton.cdiv(self.layer.max_rank, self.block_ranks) * self.block_ranks

    def num_blocks(self, num_outputs: int) -> int:
        """Return the maximum number of blocks of outputs, if each part begins with its own."""
        block = self.tile.outputs
        return (num_outputs + self.layer.num_parts * (block - 1)) // block

    @property
    def shrink(self) -> dict[str, Any]:
        """Return the constants of the first launch, but the products' dtype."""
        is_even = self.num_inputs % (self.tile.inputs * self.splits) == 0
        width = self.layer.num_parts * self.ranks
        return self._shared | {"WIDTH": width, "BLOCK_K": self.tile.inputs, "IS_EVEN": is_even}

    @property
    def expand(self) -> dict[str, Any]:
        """Return the constants of the second launch, but the products' dtype."""
        own = {"PARTS": self.layer.num_parts, "SPLITS": self.splits}
        own |= {"FIRST": ALIGNED if self.layer.is_aligned else 1}
        return self._shared | own | {"BLOCK_N": self.tile.outputs}

    @property
    def _shared(self) -> dict[str, Any]:
        shared = {"RANKS": self.ranks, "FIELDS": FIELDS, "ALIGNED": ALIGNED}
        return shared | {"BLOCK_M": self.tile.tokens, "BLOCK_R": self.block_ranks}


# ---- compiled ahead of time: layers of Llama-3.1-8B ---------------------------------------------

_INTEGERS = {"order_ptr": "*i32", "tiles_ptr": "*i32", "table_ptr": "*i64", "inner_ptr": "*fp32"}
_DIVISIBLE = ("num_inputs", "x_row", "out_row", "capacity")


def _configs(
    dtype: torch.dtype, num_inputs: int, num_parts: int, max_rank: int, *, is_few: bool
) -> list[Config]:
    launch = Launch(dtype, is_few, num_inputs, AdaptedLayer(0, num_parts, max_rank))
    return [
        _config(_shrink_kernel, launch.shrink | {"DOT": DTYPES[dtype]}, launch),
        _config(_expand_kernel, launch.expand | {"DOT": DTYPES[dtype]}, launch),
    ]


def _config(kernel: Any, constants: dict[str, Any], launch: Launch) -> Config:
    names = [name for name in kernel.arg_names if name not in constants]
    kind = DTYPES[launch.dtype]
    signature = {name: f"*{kind}" if name.endswith("_ptr") else "i32" for name in names}
    signature |= {name: _INTEGERS[name] for name in names if name in _INTEGERS}
    divisible = tuple(name for name in names if name in _DIVISIBLE)
    tile = launch.tile
    return Config(kernel, signature, constants, tile.num_warps, tile.num_stages, divisible)


CONFIGS = [
    Config(
        _slots_kernel,
        {"rows_ptr": "*i32", "starts_ptr": "*i32", "slots_ptr": "*i32"}
        | {"num_rows": "i32", "num_tokens": "i32"},
        {"NO_SLOT": 8, "BLOCK": TOKENS},
    ),
    *_configs(torch.bfloat16, 4096, 3, 16, is_few=True),
    *_configs(torch.bfloat16, 4096, 3, 16, is_few=False),
    *_configs(torch.bfloat16, 14336, 1, 256, is_few=True),
    *_configs(torch.bfloat16, 14336, 1, 256, is_few=False),
    *_configs(torch.float16, 4104, 2, 64, is_few=True),
    *_configs(torch.float32, 4096, 2, 16, is_few=False),
]
