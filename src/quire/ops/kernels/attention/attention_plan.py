"""Cut a step's paged attention into items of work on the device, once for all layers of a group.

An item is a tile of queries of one row and a range of the keys that they see. Each KV head computes
all items. The tokens of a tile, times the G query heads of a KV head, fill the rows of a matrix
product. That is SHORT_ROWS for rows with few new tokens (decoding, verifying drafts) and
`long_rows` for others.

Keys are cut into chunks, so that few rows with long contexts keep a whole GPU busy. Short tiles and
long tiles are each cut into about `items` items, or not at all if there are as many tiles. All
chunks of a kind have one size, unless a tile would exceed `max_splits`. So `items` alone bounds the
number of parts, whatever rows a step has. Items of long tiles come first, since they take longest.

    counts  [items, tokens of rows that are cut]
    items   [row, first token in the step, tokens, position of the first, first key, end of keys,
             slot of the first token or -1, slots per token, first slot of the tile, parts of a
             token]
    merges  [token in the step, its first slot, its number of slots, 0]
    arrivals  [rows, KV heads], zeros: counters of the items of a row's tile that have their parts

An item with slot -1 is the only one of its tile, and its result is final. Other items store a part
per token in a slot, and `merges` lists the slots of each token. An item may have no keys (end <=
first): it is skipped, and no merge lists its slots.

If the cut `is_fixed`, a token has the same bits however its sequence was cut into steps. Chunks
begin at multiples of `fixed_chunk` from the sequence's beginning, whatever the row's lengths. All
tiles have the same rows. A tile's first key is rounded down to a multiple of `align`, and the added
keys are masked. Lengths only decide which program computes a chunk. Rows of up to `split_tiles`
tiles have an item per chunk. Other rows have one item per tile, which merges the chunks by the same
arithmetic (attention_merge.py).

Tokens of spans that attend in both directions (AttentionStep.ends_T) see keys after their own. A
tile's keys then end where the keys of its last token end.

There is one launch with a program per row. Each program reads all rows' lengths to find where its
items go. Expected to take about 5 us for 256 rows, once per step and cache group.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import AttentionStep
from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.spec.cache_group import equal_parts

ITEM = 10  # int32 numbers of an item
MERGE = 4  # int32 numbers of a merge
HEADER = 8  # numbers before the items; two are used
MIN_ROWS = 16  # minimum rows of a matrix product
MAX_GROUP = 128  # rows of the largest matrix product
MAX_LONG_BYTES = 512  # of a head with long tiles: 256 float32 numbers would spill registers
FIXED_ROWS = 64  # of a fixed cut's products: the minimum of Hopper's matrix instruction
FIXED_LATENT_ROWS = 16  # the same of latent vectors, whose sums take more registers


@dataclass(frozen=True)
class Cut:
    """Rules by which the work of a cache group is cut. Sizes are tokens unless stated otherwise.

    group_size: G query heads of one KV head. window: 0 for none, -c if a token sees its own chunk
    of c tokens (`CacheGroup.kernel_window`). items: number of items, for each kind of tile, that
    keeps the GPU busy. max_splits: maximum number of chunks of a tile.
    short_chunk, long_chunk: minimum keys of a chunk. align: number of keys of which a tile's first
    key and the chunk size are multiples. long_rows: rows of a matrix product of long tiles.

    is_fixed: whether chunks have fixed_chunk keys, a multiple of align, which is a multiple of the
    kernel's tile of keys. fixed_rows: minimum rows of its tiles. split_tiles: maximum tiles of a
    row whose chunks are separate items. Results do not depend on it.
    """

    group_size: int = 1
    window: int = 0
    items: int = 32
    max_splits: int = 64
    short_chunk: int = 64
    long_chunk: int = 512
    align: int = 64
    long_rows: int = 128
    is_fixed: bool = False
    fixed_rows: int = FIXED_ROWS
    fixed_chunk: int = 1024
    split_tiles: int = 4

    def of_group(
        self, group_size: int, window: int | None, head_dim: int, itemsize: int = 2
    ) -> "Cut":
        """Return this cut for a cache group. itemsize: bytes of a number in matrix products."""
        assert group_size <= MAX_GROUP, f"{group_size} query heads of one KV head are too many"
        short = replace(self, group_size=group_size, window=window or 0)
        if self.is_fixed:
            assert self.fixed_chunk % self.align == 0, "chunks must begin where tiles do"
            return replace(short, long_rows=short.short_rows)
        if head_dim * itemsize > MAX_LONG_BYTES:
            return replace(short, long_rows=short.short_rows)
        # The sums of 128 rows of 256 numbers would not fit into a multiprocessor's registers.
        rows = min(self.long_rows, 64) if head_dim > 128 else self.long_rows
        return replace(short, long_rows=max(rows, short.short_rows))

    def of_latents(self, num_heads: int, max_rows: int) -> "Cut":
        """Return this cut for a group of latent vectors. max_rows: maximum rows of a tile. More
        heads are cut into equal parts, each like the query heads of a KV head."""
        rows = FIXED_LATENT_ROWS if self.is_fixed else max_rows
        own = replace(self, group_size=num_heads // equal_parts(num_heads, rows), window=0)
        own = replace(own, fixed_rows=FIXED_LATENT_ROWS)
        return replace(own, long_rows=own.short_rows if self.is_fixed else max_rows)

    @property
    def fewer(self) -> "Cut | None":
        """Cut with about half as many parts to merge; None if there are no fewer. From a fixed cut
        it gives the same bits."""
        if self.is_fixed:
            return replace(self, split_tiles=self.split_tiles // 2) if self.split_tiles else None
        return replace(self, items=self.items // 2) if self.items > 1 else None

    @property
    def short_rows(self) -> int:
        min_rows = self.fixed_rows if self.is_fixed else MIN_ROWS
        return max(min_rows, next_power_of_2(self.group_size))

    def has_long(self, query_lens: np.ndarray) -> bool:
        """Return whether a row needs long tiles. query_lens: [S]."""
        return not self.is_fixed and int(query_lens.max()) * self.group_size > self.short_rows

    def leaves_uncut(self, context_lens: np.ndarray) -> bool:
        """Return whether the device would cut others, but no rows of these lengths, [S], with one
        new token each. It cuts rows with more keys than a program's share."""
        if self.is_fixed or not 1 < self.items <= len(context_lens):
            return False
        keys = context_lens
        if self.window:
            keys = np.minimum(keys, self._window_span)
        return int(keys.max()) <= int(keys.sum(dtype=np.int64)) // self.items

    def bounds(
        self, query_lens: np.ndarray, context_lens: np.ndarray, has_ends: bool = False
    ) -> "WorkBounds":
        """Return bounds for a step whose lengths, [S] each, are at most these. They grow with each
        length. Unless the cut is fixed, they hold for any distribution of the tokens over the rows.
        has_ends: whether tokens have ends."""
        if self.is_fixed:
            fixed = replace(self, window=0) if has_ends else self
            return fixed._fixed_bounds(query_lens.astype(np.int64), context_lens.astype(np.int64))
        num_rows, num_tokens = len(query_lens), int(query_lens.sum())
        short, long = self.short_rows // self.group_size, self.long_rows // self.group_size
        if not self.has_long(query_lens):
            short, long = min(short, int(query_lens.max())), 0
        # Only tiles that see more than a chunk are cut; together they see `items` chunks at most.
        longest = int(context_lens.max())
        items = self.items if min(self.items, self.max_splits) > 1 else 0
        short_items = items if longest > self.short_chunk else 0
        long_items = items if long and longest > self.long_chunk else 0
        cut_tokens = short * short_items + long * long_items
        tiles = num_rows + (num_tokens // long if long else 0)
        return WorkBounds(
            items=tiles + short_items + long_items,
            merges=min(num_tokens, cut_tokens),
            slots=2 * cut_tokens,
        )

    def _fixed_bounds(self, queries: np.ndarray, contexts: np.ndarray) -> "WorkBounds":
        tile = self.short_rows // self.group_size
        tiles = -(-queries // tile)
        chunks = -(-contexts // self.fixed_chunk)
        if self.window:
            chunks = np.minimum(chunks, self._window_chunks)
        items = np.maximum(tiles, np.minimum(tiles, self.split_tiles) * chunks)
        merges = np.where(chunks > 1, np.minimum(queries, self.split_tiles * tile), 0)
        return WorkBounds(int(items.sum()), int(merges.sum()), int((merges * chunks).sum()))

    @property
    def _window_chunks(self) -> int:
        """Maximum number of fixed chunks that contain the keys of one tile."""
        return (self._window_span + 2 * self.fixed_chunk - 2) // self.fixed_chunk

    @property
    def _window_span(self) -> int:
        """Maximum number of keys of a short tile in a group with a window, from an aligned one."""
        return abs(self.window) + self.short_rows // self.group_size + self.align


@dataclass(frozen=True)
class WorkBounds:
    """Upper bounds of a step: items, tokens to merge, and slots for their parts."""

    items: int
    merges: int
    slots: int


@dataclass(frozen=True)
class Work:
    """Work of one step for a cache group, on the device. has_long: whether there are long tiles.
    ends_T: AttentionStep.ends_T, or None. arrivals: None if a launch of its own merges the parts;
    rows have one tile each otherwise."""

    cut: Cut
    bounds: WorkBounds
    has_long: bool
    counts: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor
    table_SL: torch.Tensor
    ends_T: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None


def plan_work(
    cut: Cut,
    step: AttentionStep,
    table_SL: torch.Tensor,
    ends_T: torch.Tensor | None = None,
    arriving_heads: int = 0,
) -> Work:
    """Launch the kernel that cuts a step's rows into items; there must be at least one row.

    Rows without tokens get no items. Lengths on the device may be less than the host's. table_SL:
    int32 [S, L]. ends_T: the step's ends on the device. arriving_heads: number of KV heads if the
    last program of a tile is to merge its parts, which it does in steps without long tiles.
    """
    query_lens, context_lens = step.query_lens_host, step.context_lens_host
    assert table_SL.dtype == torch.int32, f"needs int32 tables, got {table_SL.dtype}"
    assert step.query_starts_S1.dtype == step.context_lens_S.dtype == torch.int32
    bounds = cut.bounds(query_lens, context_lens, ends_T is not None)
    num_rows = len(query_lens)
    has_long = cut.has_long(query_lens)
    heads = 0 if has_long or cut.is_fixed or not bounds.merges else arriving_heads
    merges_at = HEADER + bounds.items * ITEM
    arrivals_at = merges_at + bounds.merges * MERGE
    size = arrivals_at + num_rows * heads
    lists = torch.empty(size, dtype=torch.int32, device=table_SL.device)
    work = Work(
        cut,
        bounds,
        has_long,
        lists[:HEADER],
        lists[HEADER:merges_at].view(-1, ITEM),
        lists[merges_at:arrivals_at].view(-1, MERGE),
        table_SL if table_SL.stride(1) == 1 else table_SL.contiguous(),
        ends_T,
        lists[arrivals_at:].view(-1, heads) if heads else None,
    )
    width = max(32, next_power_of_2(num_rows))
    _plan_kernel[(num_rows,)](
        step.query_starts_S1,
        step.context_lens_S,
        lists if ends_T is None else ends_T,
        lists,
        num_rows,
        merges_at,
        arrivals_at,
        **_constants(cut),
        KV_HEADS=heads,
        HAS_ENDS=ends_T is not None,
        WIDTH=width,
        num_warps=4,
    )
    return work


def _constants(cut: Cut) -> dict[str, int]:
    return {
        "GROUP": cut.group_size,
        "WINDOW": cut.window,
        "ITEMS": cut.items,
        "SPLITS": cut.split_tiles if cut.is_fixed else cut.max_splits,
        "SHORT_CHUNK": cut.short_chunk,
        "LONG_CHUNK": cut.long_chunk,
        "ALIGN": cut.align,
        "SHORT_ROWS": cut.short_rows,
        "LONG_ROWS": cut.long_rows,
        "FIXED_CHUNK": cut.fixed_chunk if cut.is_fixed else 0,
    }


@triton.jit
def _tiles_of(query_len, GROUP: tl.constexpr, SHORT_ROWS: tl.constexpr, LONG_ROWS: tl.constexpr):
    """Return whether a row is long, tokens of a tile, and tiles; for one row or an array of
    rows."""
    is_long = query_len * GROUP > SHORT_ROWS
    tile = tl.where(is_long, LONG_ROWS // GROUP, SHORT_ROWS // GROUP)
    return is_long, tile, (query_len + tile - 1) // tile


@triton.jit
def _span(context_len, tile, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Return the maximum number of keys that a tile sees."""
    if WINDOW != 0:
        context_len = tl.minimum(context_len, max(WINDOW, -WINDOW) + tile + ALIGN)
    return context_len


@triton.jit
def _even_chunks(
    query_len,
    context_len,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    ITEMS: tl.constexpr,
    ALIGN: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
):
    """Return the chunk sizes that cut all rows' short tiles, and their long tiles, into ITEMS items
    each."""
    is_long, tile, tiles = _tiles_of(query_len, GROUP, SHORT_ROWS, LONG_ROWS)
    keys = tiles.to(tl.int64) * _span(context_len, tile, WINDOW, ALIGN)
    short = tl.cdiv(tl.sum(tl.where(is_long, 0, keys), 0), ITEMS)
    long = tl.cdiv(tl.sum(tl.where(is_long, keys, 0), 0), ITEMS)
    # No row has more keys than this, so a larger chunk cuts no tile.
    bounds = 1 << 30
    return tl.minimum(short, bounds).to(tl.int32), tl.minimum(long, bounds).to(tl.int32)


@triton.jit
def _cut_row(
    query_len,
    context_len,
    even_short,
    even_long,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
):
    """Return the cut of a row, or of each row of an array. That is whether it is long, tokens of a
    tile, tiles, keys of a chunk, and maximum chunks of a tile. A row without tokens has no tiles
    and no chunks.

    With FIXED_CHUNK, SPLITS is the maximum number of tiles of a row that is split. Rows with more
    tiles count as long.
    """
    if FIXED_CHUNK > 0:
        is_long, tile, tiles, chunk, chunks = _cut_fixed_row(
            query_len, context_len, GROUP, WINDOW, SPLITS, ALIGN, SHORT_ROWS, FIXED_CHUNK
        )
    else:
        is_long, tile, tiles = _tiles_of(query_len, GROUP, SHORT_ROWS, LONG_ROWS)
        span = _span(context_len, tile, WINDOW, ALIGN)
        even = tl.maximum(tl.where(is_long, even_long, even_short), (span + SPLITS - 1) // SPLITS)
        even = (even + ALIGN - 1) // ALIGN * ALIGN
        chunk = tl.maximum(tl.where(is_long, LONG_CHUNK, SHORT_CHUNK), even)
        chunks = tl.where(query_len > 0, (span + chunk - 1) // chunk, 0)
    return is_long, tile, tiles, chunk, chunks


@triton.jit
def _cut_fixed_row(
    query_len,
    context_len,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
):
    tile = query_len * 0 + ROWS // GROUP
    tiles = (query_len + tile - 1) // tile
    is_long = tiles > SPLIT_TILES
    chunks = (context_len + FIXED_CHUNK - 1) // FIXED_CHUNK
    if WINDOW != 0:
        bounds = (max(WINDOW, -WINDOW) + ROWS // GROUP + ALIGN + 2 * FIXED_CHUNK - 2) // FIXED_CHUNK
        chunks = tl.minimum(chunks, bounds)
    chunks = tl.where(query_len > 0, tl.where(is_long, 1, chunks), 0)
    return is_long, tile, tiles, query_len * 0 + FIXED_CHUNK, chunks


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Return the first key that the token at a position sees, which may be below 0. WINDOW: not 0,
    see Cut."""
    if WINDOW > 0:
        return position - WINDOW + 1
    return position - position % -WINDOW


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, ALIGN: tl.constexpr):
    """Return the first key of a tile whose first token is at the position."""
    if WINDOW != 0:
        return tl.maximum(first_seen(position, WINDOW), 0) // ALIGN * ALIGN
    return position * 0


@triton.jit
def _end_of_tile(ends_ptr, token, position, count, inside, HAS_ENDS: tl.constexpr):
    """Return the end of the keys of a tile of `count` tokens from the position on. token: its first
    token in the step."""
    end = position + count
    if HAS_ENDS:
        end = tl.maximum(end, tl.load(ends_ptr + token + count - 1, mask=inside, other=0))
    return end


@kernel(do_not_specialize=["num_rows", "merges_at", "arrivals_at"])
def _plan_kernel(
    starts_ptr,
    context_lens_ptr,
    ends_ptr,
    lists_ptr,
    num_rows,
    merges_at,
    arrivals_at,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    ITEMS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT_CHUNK: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    ALIGN: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # A tile of a span sees keys beyond its window, up to the row's end.
    LIMIT: tl.constexpr = 0 if HAS_ENDS else WINDOW
    own = tl.program_id(0)
    rows = tl.arange(0, WIDTH)
    inside = rows < num_rows
    begin = tl.load(starts_ptr + rows, mask=inside, other=0)
    query_len = tl.load(starts_ptr + rows + 1, mask=inside, other=0) - begin
    context_len = tl.load(context_lens_ptr + rows, mask=inside, other=0)
    even_short, even_long = _even_chunks(
        query_len, context_len, GROUP, LIMIT, ITEMS, ALIGN, SHORT_ROWS, LONG_ROWS
    )
    is_long, tile, tiles, chunk, chunks = _cut_row(
        query_len, context_len, even_short, even_long, GROUP, LIMIT, SPLITS, SHORT_CHUNK,
        LONG_CHUNK, ALIGN, SHORT_ROWS, LONG_ROWS, FIXED_CHUNK,
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
    for head in tl.static_range(KV_HEADS):
        tl.store(lists_ptr + arrivals_at + own * KV_HEADS + head, 0)

    start = tl.load(starts_ptr + own)
    queries = tl.load(starts_ptr + own + 1) - start
    context = tl.load(context_lens_ptr + own)
    own_long, own_tile, own_tiles, own_chunk, own_chunks = _cut_row(
        queries, context, even_short, even_long, GROUP, LIMIT, SPLITS, SHORT_CHUNK,
        LONG_CHUNK, ALIGN, SHORT_ROWS, LONG_ROWS, FIXED_CHUNK,
    )  # fmt: skip
    items_ptr = lists_ptr + 8 + tl.where(own_long, long_at, short_at) * 10
    _write_items(
        items_ptr, own, start, queries, context, own_tile, own_tiles, own_chunk, own_chunks,
        slot_at, ends_ptr, WINDOW, ALIGN, FIXED_CHUNK, HAS_ENDS,
    )  # fmt: skip
    if own_chunks > 1:
        merges_ptr = lists_ptr + merges_at + merge_at * 4
        _write_merges(
            merges_ptr, start, queries, context, own_tile, own_chunk, own_chunks, slot_at,
            ends_ptr, WINDOW, ALIGN, FIXED_CHUNK, HAS_ENDS,
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
    ends_ptr,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    """Write a row's items, the last tiles first, because they see more keys than the others."""
    for first in range(0, tiles * chunks, 64):
        i = first + tl.arange(0, 64)
        inside = i < tiles * chunks
        token = (tiles - 1 - i // chunks) * tile
        count = tl.minimum(queries - token, tile)
        position = context - queries + token
        first_key = _first_key(position, WINDOW, ALIGN)
        end = _end_of_tile(ends_ptr, start + token, position, count, inside, HAS_ENDS)
        parts = (end - first_key + chunk - 1) // chunk
        if FIXED_CHUNK > 0:
            begin = (first_key // FIXED_CHUNK + i % chunks) * FIXED_CHUNK
            first_key = tl.maximum(first_key, begin)
            end = tl.where(chunks > 1, tl.minimum(begin + FIXED_CHUNK, end), end)
        else:
            first_key += i % chunks * chunk
            end = tl.minimum(first_key + chunk, end)
        first_slot = slot_at + token * chunks
        slot = tl.where(chunks > 1, first_slot + i % chunks, -1)
        at = items_ptr + i * 10
        tl.store(at, tl.zeros_like(i) + row, mask=inside)
        tl.store(at + 1, start + token, mask=inside)
        tl.store(at + 2, count, mask=inside)
        tl.store(at + 3, position, mask=inside)
        tl.store(at + 4, first_key, mask=inside)
        tl.store(at + 5, end, mask=inside)
        tl.store(at + 6, slot, mask=inside)
        tl.store(at + 7, tl.zeros_like(i) + chunks, mask=inside)
        tl.store(at + 8, first_slot, mask=inside)
        tl.store(at + 9, parts, mask=inside)


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
    ends_ptr,
    WINDOW: tl.constexpr,
    ALIGN: tl.constexpr,
    FIXED_CHUNK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):
    for first in range(0, queries, 64):
        i = first + tl.arange(0, 64)
        inside = i < queries
        token = i // tile * tile
        count = tl.minimum(queries - token, tile)
        position = context - queries + token
        first_key = _first_key(position, WINDOW, ALIGN)
        if FIXED_CHUNK > 0:
            first_key = first_key // FIXED_CHUNK * FIXED_CHUNK
        end = _end_of_tile(ends_ptr, start + token, position, count, inside, HAS_ENDS)
        keys = end - first_key
        at = merges_ptr + i * 4
        tl.store(at, start + i, mask=inside)
        tl.store(at + 1, slot_at + i * chunks, mask=inside)
        tl.store(at + 2, (keys + chunk - 1) // chunk, mask=inside)
        tl.store(at + 3, tl.zeros_like(i), mask=inside)


_SIGNATURE = {
    "starts_ptr": "*i32",
    "context_lens_ptr": "*i32",
    "ends_ptr": "*i32",
    "lists_ptr": "*i32",
    "num_rows": "i32",
    "merges_at": "i32",
    "arrivals_at": "i32",
}


def _config(
    group_size: int,
    window: int,
    width: int,
    is_fixed: bool = False,
    has_ends: bool = False,
    kv_heads: int = 0,
) -> Config:
    cut = Cut(is_fixed=is_fixed).of_group(group_size, window, 128)
    return Config(
        _plan_kernel,
        _SIGNATURE,
        _constants(cut) | {"KV_HEADS": kv_heads, "HAS_ENDS": has_ends, "WIDTH": width},
        num_warps=4,
    )


CONFIGS = [
    _config(4, 0, 32),
    _config(4, 0, 256),
    _config(8, 4096, 1024),
    _config(5, -8192, 256),
    _config(4, 0, 256, is_fixed=True),
    _config(8, 128, 256, is_fixed=True),
    _config(2, 1024, 32, has_ends=True),
    _config(4, 0, 32, kv_heads=8),
]
