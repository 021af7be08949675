"""The work of paged attention, cut on the device once per step and used by all layers of a group.

An item of work is a tile of queries of one row and a range of the keys that they see; each KV head
does all items. A tile is so many tokens that they, times the G query heads of a KV head, fill the
rows of a matrix product: SHORT_ROWS for rows with few new tokens (decoding, verification of
drafts), `long_rows` for others. Keys are cut into chunks, so that few rows with long contexts keep
a whole GPU busy. Where is decided by the row's own lengths alone: a row has the same bits in any
batch. Items of long tiles come first, since they take longest.

    counts  [items, tokens of rows that are cut]
    items   [row, first token in the step, tokens, position of the first, first key, end of keys,
             slot of the first token or -1, slots per token]
    merges  [token in the step, its first slot, its number of slots, 0]

An item with slot -1 is the only one of its tile: its result is final. Others leave a sum per token
in a slot, and `merges` says which slots make up a token. An item may have no keys (end <= first):
it is skipped, and no merge names its slots.

One launch, a program per row: each reads all rows' lengths to find its row's place. Expected to
take about 5 us for 256 rows, once per step and cache group.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from quire.ops.attention.base import AttentionStep
from quire.ops.kernels.launch import Config, next_power_of_2

ITEM = 8  # numbers of an item
MERGE = 4  # numbers of a merge
HEADER = 8  # numbers before the items; two are used
LEAST_ROWS = 16  # of a matrix product
MOST_GROUP = 128  # rows of the largest


@dataclass(frozen=True)
class Cut:
    """How the work of a cache group is cut. Sizes are tokens, if nothing else is said.

    group_size: G query heads of one KV head. window: 0 for none. max_splits: most chunks of a short
    tile, and of all tiles of a long row together. short_chunk, long_chunk: the least that is worth
    a chunk. align: chunks begin at multiples of it behind the row's first visible key, which is
    rounded down to one. long_rows: rows of a matrix product of long tiles.
    """

    group_size: int = 1
    window: int = 0
    max_splits: int = 32
    short_chunk: int = 256
    long_chunk: int = 1024
    align: int = 128
    long_rows: int = 128

    def of_group(self, group_size: int, window: int | None, head_dim: int) -> "Cut":
        """The same for a cache group."""
        assert group_size <= MOST_GROUP, f"{group_size} query heads of one KV head are too many"
        short = replace(self, group_size=group_size, window=window or 0)
        # The sums of 128 rows of 256 numbers would not fit into a multiprocessor's registers.
        rows = min(self.long_rows, 64) if head_dim > 128 else self.long_rows
        return replace(short, long_rows=max(rows, short.short_rows))

    @property
    def short_rows(self) -> int:
        return max(LEAST_ROWS, next_power_of_2(self.group_size))

    def has_long(self, query_lens: np.ndarray) -> bool:
        """Whether a row needs long tiles."""
        return int(query_lens.max()) * self.group_size > self.short_rows

    def most(self, query_lens: np.ndarray, context_lens: np.ndarray) -> "Most":
        """What a step with lengths up to these needs at most. Grows with each length."""
        queries, contexts = query_lens.astype(np.int64), context_lens.astype(np.int64)
        if self.window:
            visible = self.window + self.long_rows // self.group_size + self.align
            contexts = np.minimum(contexts, visible)
        least = min(self.short_chunk, self.long_chunk)
        tile = self.long_rows // self.group_size
        tiles = -(-queries // tile)
        chunks = np.minimum(-(-contexts // least), self.max_splits)
        items = np.minimum(tiles * chunks, np.maximum(tiles, self.max_splits))
        is_cut = (chunks > 1) & (queries > 0)
        merges = np.where(is_cut, np.minimum(queries, tile * max(1, self.max_splits // 2)), 0)
        slots = np.where(is_cut, np.minimum(queries * chunks, tile * self.max_splits), 0)
        return Most(int(items.sum()), int(merges.sum()), int(slots.sum()))


@dataclass(frozen=True)
class Most:
    """Bounds: items, tokens to be merged, slots for their parts."""

    items: int
    merges: int
    slots: int


@dataclass(frozen=True)
class Work:
    """One step's work of a cache group, on the device. has_long: whether there are long tiles."""

    cut: Cut
    most: Most
    has_long: bool
    counts: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    table_SL: torch.Tensor


def plan_work(cut: Cut, step: AttentionStep, table_SL: torch.Tensor) -> Work:
    """Launch the cutting of a step's rows; needs at least one row. Rows without tokens are left
    out. The step's lengths on the device may be less than the host's."""
    query_lens, context_lens = step.query_lens_host, step.context_lens_host
    assert table_SL.dtype == torch.int32, f"needs int32 tables, got {table_SL.dtype}"
    assert step.query_starts_S1.dtype == step.context_lens_S.dtype == torch.int32
    most = cut.most(query_lens, context_lens)
    num_rows = len(query_lens)
    merges_at = HEADER + most.items * ITEM
    size = merges_at + most.merges * MERGE
    lists = torch.empty(size, dtype=torch.int32, device=table_SL.device)
    work = Work(
        cut,
        most,
        cut.has_long(query_lens),
        lists[:HEADER],
        lists[HEADER:merges_at].view(-1, ITEM),
        lists[merges_at:].view(-1, MERGE),
        table_SL if table_SL.stride(1) == 1 else table_SL.contiguous(),
    )
    width = max(32, next_power_of_2(num_rows))
    _plan_kernel[(num_rows,)](
        step.query_starts_S1,
        step.context_lens_S,
        lists,
        num_rows,
        merges_at,
        GROUP=cut.group_size,
        WINDOW=cut.window,
        SPLITS=cut.max_splits,
        SHORT_CHUNK=cut.short_chunk,
        LONG_CHUNK=cut.long_chunk,
        ALIGN=cut.align,
        SHORT_ROWS=cut.short_rows,
        LONG_ROWS=cut.long_rows,
        WIDTH=width,
        num_warps=4,
    )
    return work


@triton.jit
def _cut_row(
    query_len,
    context_len,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
):
    """Of a row, or of each of many: whether it is long, tokens of a tile, tiles, keys of a chunk,
    and the most chunks of a tile; no tiles and no chunks for a row without tokens."""
    is_long = query_len * GROUP > SHORT_ROWS
    tile = tl.where(is_long, LONG_ROWS // GROUP, SHORT_ROWS // GROUP)
    tiles = (query_len + tile - 1) // tile
    splits = tl.where(is_long, tl.maximum(SPLITS // tl.maximum(tiles, 1), 1), SPLITS)
    span = context_len
    if WINDOW > 0:
        span = tl.minimum(span, WINDOW + tile + ALIGN)
    even = (span + splits - 1) // splits
    even = (even + ALIGN - 1) // ALIGN * ALIGN
    chunk = tl.maximum(tl.where(is_long, LONG_CHUNK, SHORT_CHUNK), even)
    chunks = tl.where(query_len > 0, (span + chunk - 1) // chunk, 0)
    return is_long, tile, tiles, chunk, chunks


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Where the keys begin of a tile whose first token is at the position."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0) // ALIGN * ALIGN
    return position * 0


@triton.jit(do_not_specialize=["num_rows", "merges_at"])
def _plan_kernel(
    starts_ptr,
    context_lens_ptr,
    lists_ptr,
    num_rows,
    merges_at,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    own = tl.program_id(0)
    rows = tl.arange(0, WIDTH)
    inside = rows < num_rows
    begin = tl.load(starts_ptr + rows, mask=inside, other=0)
    query_len = tl.load(starts_ptr + rows + 1, mask=inside, other=0) - begin
    context_len = tl.load(context_lens_ptr + rows, mask=inside, other=0)
    is_long, tile, tiles, chunk, chunks = _cut_row(
        query_len, context_len, GROUP, WINDOW, SPLITS, SHORT_CHUNK, LONG_CHUNK, ALIGN,
        SHORT_ROWS, LONG_ROWS,
    )  # fmt: skip
    items = tiles * chunks
    long_items = tl.where(is_long, items, 0)
    short_items = items - long_items
    merges = tl.where(chunks > 1, query_len, 0)
    before = rows < own
    num_long = tl.sum(long_items, 0)
    long_at = tl.sum(tl.where(before, long_items, 0), 0)
    short_at = num_long + tl.sum(tl.where(before, short_items, 0), 0)
    slot_at = tl.sum(tl.where(before, merges * chunks, 0), 0)
    merge_at = tl.sum(tl.where(before, merges, 0), 0)
    if own == 0:
        tl.store(lists_ptr, num_long + tl.sum(short_items, 0))
        tl.store(lists_ptr + 1, tl.sum(merges, 0))

    start = tl.load(starts_ptr + own)
    queries = tl.load(starts_ptr + own + 1) - start
    context = tl.load(context_lens_ptr + own)
    own_long, own_tile, own_tiles, own_chunk, own_chunks = _cut_row(
        queries, context, GROUP, WINDOW, SPLITS, SHORT_CHUNK, LONG_CHUNK, ALIGN,
        SHORT_ROWS, LONG_ROWS,
    )  # fmt: skip
    items_ptr = lists_ptr + 8 + tl.where(own_long, long_at, short_at) * 8
    _write_items(
        items_ptr, own, start, queries, context, own_tile, own_tiles, own_chunk, own_chunks,
        slot_at, WINDOW, ALIGN,
    )  # fmt: skip
    if own_chunks > 1:
        merges_ptr = lists_ptr + merges_at + merge_at * 4
        _write_merges(
            merges_ptr, start, queries, context, own_tile, own_chunk, own_chunks, slot_at,
            WINDOW, ALIGN,
        )  # fmt: skip


@triton.jit
def _write_items(
    items_ptr,
    row,
    start,
    queries,
    context,
    tile,
    tiles,
    chunk,
    chunks,
    slot_at,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """The last tiles first: they see most keys."""
    for first in range(0, tiles * chunks, 64):
        i = first + tl.arange(0, 64)
        inside = i < tiles * chunks
        token = (tiles - 1 - i // chunks) * tile
        count = tl.minimum(queries - token, tile)
        position = context - queries + token
        first_key = _first_key(position, WINDOW, ALIGN) + i % chunks * chunk
        end = tl.minimum(first_key + chunk, position + count)
        slot = tl.where(chunks > 1, slot_at + token * chunks + i % chunks, -1)
        at = items_ptr + i * 8
        tl.store(at, tl.zeros_like(i) + row, mask=inside)
        tl.store(at + 1, start + token, mask=inside)
        tl.store(at + 2, count, mask=inside)
        tl.store(at + 3, position, mask=inside)
        tl.store(at + 4, first_key, mask=inside)
        tl.store(at + 5, end, mask=inside)
        tl.store(at + 6, slot, mask=inside)
        tl.store(at + 7, tl.zeros_like(i) + chunks, mask=inside)


@triton.jit
def _write_merges(
    merges_ptr,
    start,
    queries,
    context,
    tile,
    chunk,
    chunks,
    slot_at,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
):
    for first in range(0, queries, 64):
        i = first + tl.arange(0, 64)
        inside = i < queries
        token = i // tile * tile
        count = tl.minimum(queries - token, tile)
        position = context - queries + token
        keys = position + count - _first_key(position, WINDOW, ALIGN)
        at = merges_ptr + i * 4
        tl.store(at, start + i, mask=inside)
        tl.store(at + 1, slot_at + i * chunks, mask=inside)
        tl.store(at + 2, (keys + chunk - 1) // chunk, mask=inside)
        tl.store(at + 3, tl.zeros_like(i), mask=inside)


_SIGNATURE = {
    "starts_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "lists_ptr": "*i32",
    "num_rows": "i32",
    "merges_at": "i32",
}


def _config(group_size: int, window: int, width: int) -> Config:
    cut = Cut().of_group(group_size, window, 128)
    constants = {
        "GROUP": group_size,
        "WINDOW": window,
        "SPLITS": cut.max_splits,
        "SHORT_CHUNK": cut.short_chunk,
        "LONG_CHUNK": cut.long_chunk,
        "ALIGN": cut.align,
        "SHORT_ROWS": cut.short_rows,
        "LONG_ROWS": cut.long_rows,
        "WIDTH": width,
    }
    return Config(_plan_kernel, _SIGNATURE, constants, num_warps=4)


CONFIGS = [_config(4, 0, 32), _config(4, 0, 256), _config(8, 4096, 1024)]
