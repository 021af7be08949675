"""Paged attention: one launch for all rows of a step, prompt chunks and decoding rows mixed.

Shape legend: T tokens, N query heads, K KV heads, G = N / K, H head dim, L longest block table, P
tokens per block, D slots.

The inputs are queries [T, N, H], a layer's keys and values in blocks (`LayerKV`), and the items of
the step (`Work`). The output is [T, N, H].

The G query heads of a KV head are rows of one matrix product. So each key and value is loaded once
for all of them. A fixed number of programs shares the items of `attention_plan.Work` times the KV
heads. Each program scans an item's keys with a running maximum and sum (equation 4 of P 4.1), in
float32. Tiles are short (16 rows) or long (attention_tiles.py); a launch without long tiles
takes fewer warps. A second, small launch merges the parts of rows whose keys were cut
(attention_merge.py). It is skipped if no row can be cut, and if the last program of a tile merges
the parts (`Work.arrivals`).

Only the keys at a tile's edges are masked. Keys that a tile does not see are not loaded, so unused
slots may hold anything. Under a fixed cut (attention_plan.py) all tiles are of one kind and
entirely masked. Chunks are merged in order, and no product is fused with a sum.

Measured on an H200 (2026-11-27, heads of 128, 8 KV heads, blocks in any order, cold cache): 64 rows
of 4,096 tokens read 4.07 TB/s. 256 rows of 1,024 tokens read 3.97 TB/s, and 64 rows of 512 read
2.6. One row of 512 takes 12 us, mostly latency. A prompt of 2,048 reaches 290 TFLOP/s, since
products and exponentials take turns.
"""

import math

import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention.attention_merge import (
    before_chunks,
    last_constants,
    merge,
    merge_chunk,
    merge_last,
    store_item,
)
from quire.ops.kernels.attention.attention_plan import Cut, Work, first_seen
from quire.ops.kernels.attention.attention_tiles import HOPPER, Machine, constants, num_warps
from quire.ops.kernels.attention.attention_write import (
    LayerKV,
    as_float16,
    load_rows,
    load_scales,
)
from quire.ops.kernels.launch import DTYPES, Config, kernel, overlaps, pdl_option, wait_if

LOG2_E = math.log2(math.e)


def attention(
    q_TNH: torch.Tensor,
    kv: LayerKV,
    work: Work,
    scores: Scores,
    machine: Machine,
    out_TNH: torch.Tensor | None = None,
    sums_TN2: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of the step that `work` was cut from, [T, N, H] in q's dtype. Tokens
    that belong to no row have undefined results.

    A token's heads must be contiguous in q. out_TNH: contiguous tensor for the result. sums_TN2:
    float32 [T, N, 2] to fill: each query's largest score times log2(e), and the sum of its weights
    relative to that score. Sinks are then ignored.
    """
    num_tokens, num_heads, size = q_TNH.shape
    assert q_TNH.stride()[1:] == (size, 1), f"heads must follow, got {q_TNH.stride()}"
    assert num_heads == kv.num_heads * work.cut.group_size, "the work was cut for other heads"
    if out_TNH is None:
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    assert out_TNH.is_contiguous() and out_TNH.shape == q_TNH.shape
    if num_tokens == 0 or work.bounds.items == 0:
        return out_TNH
    shape_DN = (work.bounds.slots, num_heads)
    parts_DNH = torch.empty((*shape_DN, size), dtype=torch.float32, device=q_TNH.device)
    sums_DN2 = torch.empty((*shape_DN, 2), dtype=torch.float32, device=q_TNH.device)
    soft_cap, sinks_N = scores.soft_cap, None if sums_TN2 is not None else scores.sinks_N
    factor = scores.scale * kv.k_scale
    is_ahead = overlaps(q_TNH.device) and not (work.has_long or work.cut.is_fixed)
    _attention_kernel[(min(work.bounds.items * kv.num_heads, machine.num_programs),)](
        q_TNH,
        kv.k,
        kv.v,
        kv.k_scales,
        kv.v_scales,
        out_TNH,
        parts_DNH,
        sums_DN2,
        work.counts,
        work.items,
        work.items if work.ends_T is None else work.ends_T,
        work.table_SL,
        out_TNH if sinks_N is None else sinks_N,
        out_TNH if sums_TN2 is None else sums_TN2,
        work.items if work.arrivals is None else work.arrivals,
        q_TNH.stride(0),
        work.table_SL.stride(0),
        kv.head_stride,
        factor / soft_cap if soft_cap is not None else factor * LOG2_E,
        (soft_cap or 0.0) * LOG2_E,
        kv.v_scale,
        **constants(work.cut, q_TNH.dtype, kv.num_heads, size, kv.block_size, kv.kv_format),
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks_N is not None,
        KEEPS=sums_TN2 is not None,
        HAS_LONG=work.has_long,
        HAS_ENDS=work.ends_T is not None,
        **last_constants(work.cut, size, work.arrivals is not None),
        AHEAD=is_ahead,
        num_warps=num_warps(work.cut, size, kv.kv_format, work.has_long, machine),
        num_stages=machine.num_stages if q_TNH.dtype.itemsize < 4 else 2,
        enable_fp_fusion=not work.cut.is_fixed,
        **pdl_option(is_ahead),
    )
    if work.bounds.merges and work.arrivals is None:
        sinks, given = sinks_N if work.cut.is_fixed else None, (out_TNH, parts_DNH, sums_DN2)
        merge(*given, work, kv.v_scale, machine.num_programs, sinks, sums_TN2)
    return out_TNH


@kernel(do_not_specialize=["table_stride"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    counts_ptr,
    items_ptr,
    ends_ptr,
    tables_ptr,
    sinks_ptr,
    kept_ptr,
    arrivals_ptr,
    q_stride,
    table_stride,
    head_stride,
    factor,  # of products; with a soft cap, already divided by it
    cap,  # soft cap times log2(e), the factor of tanh
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_LONG: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG_ROWS: tl.constexpr,
    SHORT_TILE: tl.constexpr,
    LONG_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
    LAST_HEADS: tl.constexpr,
    LAST_AT_ONCE: tl.constexpr,  # 0: another launch merges the parts
    AHEAD: tl.constexpr,
):
    wait_if(AHEAD)
    for unit in range(tl.program_id(0), tl.load(counts_ptr) * NUM_KV_HEADS, tl.num_programs(0)):
        item_ptr = items_ptr + unit // NUM_KV_HEADS * 10
        head = unit % NUM_KV_HEADS
        table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
        kv_at = head.to(tl.int64) * head_stride
        if CHUNK > 0:
            _attend_fixed(
                q_ptr, k_ptr + kv_at, v_ptr + kv_at, k_scales_ptr + kv_at // 4,
                v_scales_ptr + kv_at // 4, out_ptr, parts_ptr, sums_ptr, item_ptr, ends_ptr,
                table_ptr, sinks_ptr, kept_ptr, head, q_stride, factor, cap, v_scale, NUM_KV_HEADS,
                GROUP, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE, WINDOW, FORMAT, HAS_CAP, HAS_SINKS, KEEPS,
                HAS_ENDS, SHORT_ROWS, SHORT_TILE, CHUNK, DOT,
            )  # fmt: skip
        elif (tl.load(item_ptr + 2) * GROUP if HAS_LONG else 0) > SHORT_ROWS:
            _attend(
                q_ptr, k_ptr + kv_at, v_ptr + kv_at, k_scales_ptr + kv_at // 4,
                v_scales_ptr + kv_at // 4, out_ptr, parts_ptr, sums_ptr, item_ptr, ends_ptr,
                table_ptr, sinks_ptr, kept_ptr, head, q_stride, factor, cap, v_scale, NUM_KV_HEADS,
                GROUP, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE, WINDOW, FORMAT, HAS_CAP, HAS_SINKS, KEEPS,
                HAS_ENDS, LONG_ROWS, LONG_TILE, DOT,
            )  # fmt: skip
        else:
            _attend(
                q_ptr, k_ptr + kv_at, v_ptr + kv_at, k_scales_ptr + kv_at // 4,
                v_scales_ptr + kv_at // 4, out_ptr, parts_ptr, sums_ptr, item_ptr, ends_ptr,
                table_ptr, sinks_ptr, kept_ptr, head, q_stride, factor, cap, v_scale, NUM_KV_HEADS,
                GROUP, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE, WINDOW, FORMAT, HAS_CAP, HAS_SINKS, KEEPS,
                HAS_ENDS, SHORT_ROWS, SHORT_TILE, DOT,
            )  # fmt: skip
            if LAST_AT_ONCE > 0:
                merge_last(
                    out_ptr, parts_ptr, sums_ptr, kept_ptr, item_ptr, arrivals_ptr, head, v_scale,
                    NUM_KV_HEADS, GROUP, HEAD_DIM, WIDTH, KEEPS, LAST_HEADS, LAST_AT_ONCE,
                )  # fmt: skip


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    item_ptr,
    ends_ptr,
    table_ptr,
    sinks_ptr,
    kept_ptr,
    head,
    q_stride,
    factor,
    cap,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute one item of one KV head in ROWS matrix rows: row m is token m // G, query head m %
    G."""
    count = tl.load(item_ptr + 2)
    q, token, offset, query_head, used, query, last_seen, position, first, end, lowest = _load_item(
        q_ptr, item_ptr, ends_ptr, head, q_stride, GROUP, HEAD_DIM, WIDTH, WINDOW, HAS_ENDS, ROWS,
    )  # fmt: skip
    q, factor = _operand(q, factor, FORMAT, DOT)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # Count the sink once, in the chunk that begins where the tile's keys do.
        has_sink = first <= lowest
        sink = tl.load(sinks_ptr + query_head, mask=used & has_sink, other=float("-inf"))
        maximum = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
        total = tl.zeros([ROWS], tl.float32) + tl.where(has_sink, 1.0, 0.0)
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    # [first, whole) needs the window's mask, [whole, edge) no mask, [edge, end) the causal mask.
    edge = first
    if ROWS > 16:
        whole, edge = _unmasked(first, end, position, count, WINDOW, TILE)
        if WINDOW != 0:
            maximum, total, values = scan(
                q, maximum, total, values, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
                first, whole, lowest, end, query, last_seen, factor, cap, HEAD_DIM, WIDTH, ROW,
                BLOCK_SIZE, WINDOW, FORMAT, HAS_CAP, TILE, DOT, True,
            )  # fmt: skip
        maximum, total, values = scan(
            q, maximum, total, values, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, whole,
            edge, lowest, end, query, last_seen, factor, cap, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE,
            WINDOW, FORMAT, HAS_CAP, TILE, DOT, False,
        )  # fmt: skip
    maximum, total, values = scan(
        q, maximum, total, values, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, edge, end,
        lowest, end, query, last_seen, factor, cap, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE, WINDOW,
        FORMAT, HAS_CAP, TILE, DOT, True,
    )  # fmt: skip
    store_item(
        values, maximum, total, out_ptr, parts_ptr, sums_ptr, kept_ptr, item_ptr, token, offset,
        query_head, used, v_scale, NUM_KV_HEADS * GROUP, HEAD_DIM, WIDTH, KEEPS, False,
    )  # fmt: skip


@triton.jit
def _load_item(
    q_ptr,
    item_ptr,
    ends_ptr,
    head,
    q_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load an item's queries, and return what describes its rows and keys.

    For each row: its token, the token's offset in the item, query head, whether the row is used,
    position, and last visible position. For the item: position of the first token, the keys [first,
    end), and the lowest visible key.
    """
    position = tl.load(item_ptr + 3)
    first = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    m = tl.arange(0, ROWS)
    offset = m // GROUP
    query_head = head * GROUP + m % GROUP
    used = offset < tl.load(item_ptr + 2)
    token = tl.load(item_ptr + 1).to(tl.int64) + offset
    h = tl.arange(0, WIDTH)
    q_at = (token * q_stride + query_head * HEAD_DIM)[:, None] + h[None, :]
    columns = used[:, None] & (h < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=columns, other=0.0)
    query = position + offset
    last_seen = query
    if HAS_ENDS:
        last_seen = tl.maximum(query, tl.load(ends_ptr + token, mask=used, other=0) - 1)
    lowest = tl.maximum(first_seen(position, WINDOW), 0) if WINDOW != 0 else 0
    return q, token, offset, query_head, used, query, last_seen, position, first, end, lowest


@triton.jit
def _operand(q, factor, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Return the queries as an operand of products, and the factor of their scores."""
    if FORMAT == 2 and tl.float16 == DOT:
        q, factor = as_float16(q, factor)
    return q.to(DOT), factor


@triton.jit
def _attend_fixed(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    item_ptr,
    ends_ptr,
    table_ptr,
    sinks_ptr,
    kept_ptr,
    head,
    q_stride,
    factor,
    cap,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEEPS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute one item of a fixed cut: all chunks of a tile, or one chunk to be merged with others.

    All tiles of keys are masked, even tiles that every query sees entirely. So one loop, with the
    same instructions, handles each of them.
    """
    q, token, offset, query_head, used, query, last_seen, _, first, end, lowest = _load_item(
        q_ptr, item_ptr, ends_ptr, head, q_stride, GROUP, HEAD_DIM, WIDTH, WINDOW, HAS_ENDS, ROWS,
    )  # fmt: skip
    q, factor = _operand(q, factor, FORMAT, DOT)
    # For parts, the merge adds the sinks.
    is_final = tl.load(item_ptr + 6) < 0
    maximum, total = before_chunks(sinks_ptr, query_head, used & is_final, HAS_SINKS)
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    for chunk in range(first // CHUNK * CHUNK, end, CHUNK):
        stop = tl.minimum(chunk + CHUNK, end)
        chunk_maximum, chunk_total, chunk_values = scan(
            q, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, WIDTH], tl.float32), k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
            table_ptr, tl.maximum(chunk, first), stop, lowest, stop, query, last_seen, factor,
            cap, HEAD_DIM, WIDTH, ROW, BLOCK_SIZE, WINDOW, FORMAT, HAS_CAP, TILE, DOT, True,
        )  # fmt: skip
        maximum, total, values = merge_chunk(
            maximum, total, values, chunk_maximum, chunk_total, chunk_values
        )
    store_item(
        values, maximum, total, out_ptr, parts_ptr, sums_ptr, kept_ptr, item_ptr, token, offset,
        query_head, used, v_scale, NUM_KV_HEADS * GROUP, HEAD_DIM, WIDTH, KEEPS, True,
    )  # fmt: skip


@triton.jit
def _unmasked(first, end, position, count, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return where the tiles of keys that every query of the item sees begin and end."""
    whole = first
    if WINDOW != 0:
        hidden = tl.maximum(first_seen(position + count - 1, WINDOW) - first, 0)
        whole = tl.minimum(first + tl.cdiv(hidden, TILE) * TILE, tl.maximum(end, first))
    edge = whole + tl.maximum(tl.minimum(end, position + 1) - whole, 0) // TILE * TILE
    return whole, edge


@triton.jit
def scan(
    q,
    maximum,
    total,
    values,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,
    first,
    last,
    lowest,
    end,
    query,
    last_seen,
    factor,
    cap,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_CAP: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys [first, last), TILE at once. Keys exist in [lowest, end). Without MASKED
    every query sees all of them."""
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DOT else "ieee"  # AMD has no tf32x3
    n = tl.arange(0, TILE)
    key = first + n
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=(key >= lowest) & (key < end), other=0)
    if FORMAT == 1:
        k_scale, v_scale = load_scales(
            k_scales_ptr, v_scales_ptr, block, key, lowest, end, HEAD_DIM, BLOCK_SIZE, ROW
        )
    for start in range(first, last, TILE):
        key = start + n
        inside = (key >= lowest) & (key < end)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        # Load the next keys' block ids one iteration early, so that the keys can be prefetched.
        key += TILE
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=(key >= lowest) & (key < end), other=0)
        key -= TILE
        k = load_rows(k_ptr, slot, inside, HEAD_DIM, WIDTH, BLOCK_SIZE, ROW, FORMAT, DOT, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor
        if FORMAT == 1:
            scores *= k_scale[None, :]
        if HAS_CAP:
            # tanh(x) = 1 - 2 / (1 + e^(2x))
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * 2.8853900817779268))
        if MASKED:
            seen = inside[None, :] & (key[None, :] <= last_seen[:, None])
            if WINDOW != 0:
                seen &= key[None, :] >= first_seen(query, WINDOW)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        base = larger
        if MASKED:
            # A query that has seen no key yet has the maximum -inf; 0 keeps its weights at 0.
            base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(maximum - base)
        total = total * correction + tl.sum(weights, 1)
        if FORMAT == 1:
            weights *= v_scale[None, :]
        v = load_rows(v_ptr, slot, inside, HEAD_DIM, WIDTH, BLOCK_SIZE, ROW, FORMAT, DOT, MASKED)
        values = values * correction[:, None]
        values = tl.dot(weights.to(DOT), v, values, input_precision=PRECISION)
        maximum = larger
        if FORMAT == 1:
            # Loaded one iteration early as well. Triton would prefetch them by copies of 4 bytes.
            key += TILE
            k_scale, v_scale = load_scales(
                k_scales_ptr, v_scales_ptr, block, key, lowest, end, HEAD_DIM, BLOCK_SIZE, ROW
            )
    return maximum, total, values


def config(
    size: int,
    group_size: int = 4,
    *,
    has_long: bool = True,
    kv_format: str = "auto",
    window: int = 0,
    has_cap: bool = False,
    has_sinks: bool = False,
    stores_softmax: bool = False,
    is_fixed: bool = False,
    has_ends: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = HOPPER,
    merges_last: bool = False,
    is_ahead: bool = False,
) -> Config:
    """Return a launch as `attention` makes it on a machine, to compile it ahead of time."""
    q = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    stored = q if kv_format == "auto" else "*u8"
    scales = "*fp32" if kv_format == "int8" else stored
    signature = {
        "q_ptr": q, "k_ptr": stored, "v_ptr": stored, "k_scales_ptr": scales,
        "v_scales_ptr": scales, "out_ptr": q, "parts_ptr": "*fp32", "sums_ptr": "*fp32",
        "counts_ptr": "*i32", "items_ptr": "*i32", "ends_ptr": "*i32", "tables_ptr": "*i32",
        "sinks_ptr": "*fp32", "kept_ptr": "*fp32", "arrivals_ptr": "*i32",
        "q_stride": "i32", "table_stride": "i32", "head_stride": "i64", "factor": "fp32",
        "cap": "fp32", "v_scale": "fp32",
    }  # fmt: skip
    cut = Cut(is_fixed=is_fixed, long_rows=machine.long_rows).of_group(group_size, window, size)
    given = constants(cut, dtype, 8, size, 16, kv_format)
    # Compiled ahead of time, even if this process interprets kernels.
    given |= {"DOT": DTYPES[torch.float16 if kv_format == "fp8" else dtype]}
    given |= {"HAS_CAP": has_cap, "HAS_SINKS": has_sinks, "KEEPS": stores_softmax}
    given |= {"HAS_LONG": has_long and not is_fixed, "HAS_ENDS": has_ends}
    given |= last_constants(cut, size, merges_last) | {"AHEAD": is_ahead}
    return Config(
        _attention_kernel,
        signature,
        given,
        num_warps=num_warps(cut, size, kv_format, has_long, machine),
        num_stages=machine.num_stages,
        divisible=("q_stride", "head_stride"),
        needs_wgmma=has_long and machine.has_warp_groups,
    )


CONFIGS = [
    config(128),
    config(128, has_long=False),
    config(128, has_long=False, stores_softmax=True),
    config(64, window=128, has_cap=True, has_sinks=True),
    config(80, 1),
    config(256, 2),
    config(256, 2, window=4096, has_cap=True),
    config(256, 2, window=1024, has_ends=True),
    config(128, 5, window=-8192),
    config(128, kv_format="int8"),
    config(128, has_long=False, kv_format="int8"),
    config(128, kv_format="fp8"),
    config(128, has_long=False, kv_format="fp8"),
    config(128, machine=HOPPER.with_small_tiles),
    config(128, is_fixed=True),
    config(64, 8, window=128, has_cap=True, has_sinks=True, is_fixed=True),
    config(80, 1, is_fixed=True),
    config(256, 2, is_fixed=True),
    config(256, 2, window=1024, is_fixed=True, has_ends=True),
    config(128, 5, window=-8192, is_fixed=True),
    config(256, 2, has_cap=True, is_fixed=True),
    config(128, kv_format="int8", is_fixed=True),
    config(64, kv_format="int8", is_fixed=True),
    config(128, kv_format="fp8", is_fixed=True),
]
# Launches whose last program merges the parts, and launches that may overlap.
ARRIVING = [config(128, has_long=False, merges_last=True)]
OVERLAPPING = [
    config(128, has_long=False, merges_last=merges_last, is_ahead=True)
    for merges_last in (False, True)
]
