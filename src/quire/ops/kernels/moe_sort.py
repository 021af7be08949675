"""Sort pairs of a token and an expert by expert, and cut them into tiles, on the device.

Shape legend: T tokens, C experts of a token, P = T C pairs, E experts, M tiles at most.

    order  int32 [P]      pairs by expert; an expert's pairs in their original order
    tiles  int32 [3, M]   of each tile: its expert, and where in `order` it begins and ends
    counts int32 [chunks, E padded]   pairs of each expert in each chunk

The grid depends on P alone. One program sorts up to 1,024 pairs, while others write the tiles. More
pairs are counted first, in a launch of their own. Nothing is counted atomically in global memory,
so the order is always the same.

Expected, not measured: some microseconds, of latency rather than of bytes (8,192 tokens of 8
experts are 256 KB of ids).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2

SMALL_CHUNK, CHUNK = 128, 1024  # pairs that one program sorts
TILES_OF_A_PROGRAM = 32
CHUNKS_AT_ONCE = 16


@triton.jit
def tile_bounds(tiles_ptr, max_tiles):
    """Return a program's tile, and where it begins and ends in the order: at one index if it is
    empty."""
    tile = tl.program_id(1)
    first = tl.load(tiles_ptr + max_tiles + tile)
    return tile, first, tl.load(tiles_ptr + 2 * max_tiles + tile)


@triton.jit
def _real_pairs(num_pairs, num_real_ptr, NUM_CHOSEN: tl.constexpr):
    """Return the number of pairs of tokens that are not padding; NUM_CHOSEN 0: there is none."""
    if NUM_CHOSEN > 0:
        num_pairs = tl.minimum(num_pairs, tl.load(num_real_ptr) * NUM_CHOSEN)
    return num_pairs


@kernel(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids_ptr, num_real_ptr, counts_ptr, num_pairs, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    num_pairs = _real_pairs(num_pairs, num_real_ptr, NUM_CHOSEN)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=0)
    counts = tl.histogram(ids, WIDTH, mask=at < num_pairs)
    tl.store(counts_ptr + chunk * WIDTH + tl.arange(0, WIDTH), counts)


@kernel(do_not_specialize=["num_pairs", "num_chunks", "max_tiles", "num_experts"])
def _sort_kernel(
    ids_ptr,
    num_real_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_chunks,
    max_tiles,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_AT_ONCE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """Sort a chunk of pairs in each of the first num_chunks programs; write tiles in the others."""
    program = tl.program_id(0)
    num_pairs = _real_pairs(num_pairs, num_real_ptr, NUM_CHOSEN)
    experts = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)  # pairs of each expert in earlier chunks
    if ONE_CHUNK:
        at = tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=0)
        total = tl.histogram(ids, WIDTH, mask=at < num_pairs)
    else:
        for first in range(0, num_chunks, CHUNKS_AT_ONCE):
            chunks = first + tl.arange(0, CHUNKS_AT_ONCE)[:, None]
            places = counts_ptr + chunks * WIDTH + experts[None, :]
            counts = tl.load(places, mask=chunks < num_chunks, other=0)
            total += tl.sum(counts, axis=0)
            before += tl.sum(tl.where(chunks < program, counts, 0), axis=0)
    starts = tl.cumsum(total, axis=0) - total
    if program < num_chunks:
        at = tl.arange(0, CHUNK)
        pairs = program * CHUNK + at
        inside = pairs < num_pairs
        ids = tl.load(ids_ptr + pairs, mask=inside, other=0)
        own = tl.histogram(ids, WIDTH, mask=inside)
        keys = tl.sort(tl.where(inside, ids, WIDTH) * CHUNK + at)
        expert = keys // CHUNK
        # A pair's index: where its expert's pairs of this chunk begin, and how many precede it.
        base = starts + before - (tl.cumsum(own, axis=0) - own)
        order_at = tl.gather(base, tl.minimum(expert, WIDTH - 1), axis=0) + at
        pair = program * CHUNK + keys % CHUNK
        tl.store(order_ptr + order_at, pair, mask=expert < WIDTH)
    else:
        tile = (program - num_chunks) * TILES + tl.arange(0, TILES)
        num_tiles = tl.where(experts < num_experts, (total + BLOCK_M - 1) // BLOCK_M, 0)
        before_it = tl.cumsum(num_tiles, axis=0) - num_tiles
        index = tile[:, None] - before_it[None, :]  # of the tile among its expert's tiles
        is_own = (index >= 0) & (index < num_tiles[None, :])
        tile_expert = tl.sum(tl.where(is_own, experts[None, :], 0), axis=1)
        begin = tl.sum(tl.where(is_own, starts[None, :] + index * BLOCK_M, 0), axis=1)
        end = tl.sum(tl.where(is_own, (starts + total)[None, :], 0), axis=1)
        exists = tile < max_tiles
        tl.store(tiles_ptr + tile, tile_expert, mask=exists)
        tl.store(tiles_ptr + max_tiles + tile, begin, mask=exists)
        tl.store(tiles_ptr + 2 * max_tiles + tile, tl.minimum(end, begin + BLOCK_M), mask=exists)


def sort_by_expert(
    ids_TC: torch.Tensor,
    num_experts: int,
    tile_pairs: int,
    has_others: bool = False,
    num_real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs of ids [T, C] by expert, in one or two launches, and cut them into tiles of one
    expert.

    Return the order, int32 [P], and the tiles, int32 [3, M]: expert, begin and end in the order. A
    tile has at most tile_pairs pairs. M is the maximum number of tiles; unused tiles have begin and
    end 0. has_others: whether there are pairs of expert num_experts, which come last and in no
    tile. num_real: int32 [1], the number of tokens that are not padding; the pairs of the others
    are neither in the order nor in a tile.
    """
    num_pairs, device = ids_TC.numel(), ids_TC.device
    width = next_power_of_2(num_experts + has_others)
    chunk = SMALL_CHUNK if num_pairs <= SMALL_CHUNK else CHUNK
    num_chunks = triton.cdiv(num_pairs, chunk)
    max_tiles = max_num_tiles(num_pairs, num_experts, tile_pairs)
    order_P = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles_3M = torch.empty(3, max_tiles, dtype=torch.int32, device=device)
    counts = order_P
    padding = {"NUM_CHOSEN": 0 if num_real is None else ids_TC.shape[1]}
    num_real = ids_TC if num_real is None else num_real  # a placeholder is not read
    if num_chunks > 1:
        counts = torch.empty(num_chunks, width, dtype=torch.int32, device=device)
        _count_kernel[(num_chunks,)](
            ids_TC, num_real, counts, num_pairs, WIDTH=width, CHUNK=chunk, **padding
        )
    _sort_kernel[(num_chunks + triton.cdiv(max_tiles, TILES_OF_A_PROGRAM),)](
        ids_TC,
        num_real,
        counts,
        order_P,
        tiles_3M,
        num_pairs,
        num_chunks,
        max_tiles,
        num_experts,
        WIDTH=width,
        CHUNK=chunk,
        CHUNKS_AT_ONCE=CHUNKS_AT_ONCE,
        TILES=TILES_OF_A_PROGRAM,
        BLOCK_M=tile_pairs,
        ONE_CHUNK=num_chunks == 1,
        num_warps=_sort_warps(chunk),
        **padding,
    )
    return order_P, tiles_3M


def max_num_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """Return the maximum number of tiles of any routing: one per expert, plus full tiles."""
    hit = min(num_pairs, num_experts)
    return hit + (num_pairs - hit) // tile_pairs


def _sort_warps(chunk: int) -> int:
    return 4 if chunk <= SMALL_CHUNK else 8


_COUNT_SIGNATURE = {"ids_ptr": "*i32", "num_real_ptr": "*i32", "counts_ptr": "*i32"}
_COUNT_SIGNATURE |= {"num_pairs": "i32"}
_SORT_SIGNATURE = _COUNT_SIGNATURE | {"order_ptr": "*i32", "tiles_ptr": "*i32"}
_SORT_SIGNATURE |= {"num_chunks": "i32", "max_tiles": "i32", "num_experts": "i32"}


def _sort_config(chunk: int, is_only: bool, num_chosen: int) -> Config:
    constants: dict[str, Any] = {"WIDTH": 128, "CHUNK": chunk, "BLOCK_M": 16}
    constants |= {"CHUNKS_AT_ONCE": CHUNKS_AT_ONCE, "TILES": TILES_OF_A_PROGRAM}
    constants |= {"ONE_CHUNK": is_only, "NUM_CHOSEN": num_chosen}
    return Config(_sort_kernel, _SORT_SIGNATURE, constants, num_warps=_sort_warps(chunk))


CONFIGS = [
    config
    for num_chosen in (0, 8)
    for config in (
        Config(
            _count_kernel,
            _COUNT_SIGNATURE,
            {"NUM_CHOSEN": num_chosen, "WIDTH": 128, "CHUNK": CHUNK},
        ),
        _sort_config(SMALL_CHUNK, True, num_chosen),
        _sort_config(CHUNK, True, num_chosen),
        _sort_config(CHUNK, False, num_chosen),
    )
]
