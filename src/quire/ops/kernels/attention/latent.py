"""Multi-head latent attention in absorbed form (DeepSeek-V2, section 2.1): one launch for all rows.

Shape legend: T tokens, N query heads, L elements of a latent vector, V of them values, R = L - V
others, D slots.

All heads read the same latent vectors: a key is a whole vector, and its value the first V elements.
So a tile of keys is loaded once for both products, as two parts of V and of R elements. Their sizes
are powers of two, 512 and 64 for DeepSeek's models. The heads of a token fill the rows of a tile.
More heads than rows are cut into equal parts. The parts are treated like the query heads of KV
heads that share one memory. Items, merges and fixed cuts are the same as in other attention
(attention_plan.py, attention_merge.py, attention.py).

Expected on an H200, not measured: 16 heads compute 15 products per byte of bfloat16, so a decoding
row is limited by reading. 128 heads compute 121 products per byte, and the products are the limit.
"""

import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention.attention import LOG2_E
from quire.ops.kernels.attention.attention_merge import finished, merge, merge_chunk
from quire.ops.kernels.attention.attention_plan import Cut, Work
from quire.ops.kernels.attention.attention_tiles import (
    HOPPER,
    LATENT_WARPS,
    Machine,
    latent_constants,
    latent_rows,
    latent_stages,
)
from quire.ops.kernels.attention.attention_write import (
    LayerKV,
    exponents_of,
    factor_of,
    row_of,
    scale_of,
    with_exponent_14,
)
from quire.ops.kernels.launch import DTYPES, Config, kernel


def latent_attention(
    q_TNL: torch.Tensor,
    kv: LayerKV,
    work: Work,
    scores: Scores,
    machine: Machine,
    num_values: int,
) -> torch.Tensor:
    """Return the attention of the step that `work` was cut from, [T, N, V] in q's dtype. Tokens
    that belong to no row have undefined results.

    q must be contiguous. kv: the layer's latent vectors as keys. num_values: V.
    """
    num_tokens, num_heads, size = q_TNL.shape
    assert q_TNL.is_contiguous(), f"q must be contiguous, got {q_TNL.stride()}"
    assert num_heads % work.cut.group_size == 0, "the work was cut for other heads"
    assert scores.soft_cap is None and scores.sinks_N is None, "latent attention has neither"
    out_TNV = q_TNL.new_empty(num_tokens, num_heads, num_values)
    if num_tokens == 0 or work.bounds.items == 0:
        return out_TNV
    slots = work.bounds.slots
    parts_DNV = out_TNV.new_empty(slots, num_heads, num_values, dtype=torch.float32)
    sums_DN2 = out_TNV.new_empty(slots, num_heads, 2, dtype=torch.float32)
    num_parts = num_heads // work.cut.group_size
    _latent_kernel[(min(work.bounds.items * num_parts, machine.num_programs),)](
        q_TNL,
        kv.k,
        kv.k_scales,
        out_TNV,
        parts_DNV,
        sums_DN2,
        work.counts,
        work.items,
        work.table_SL,
        work.table_SL.stride(0),
        scores.scale * kv.k_scale * LOG2_E,
        kv.k_scale,
        **latent_constants(
            work.cut, q_TNL.dtype, num_parts, size, num_values, kv.block_size, kv.kv_format, machine
        ),
        ROWS=work.cut.long_rows if work.has_long else work.cut.short_rows,
        num_warps=LATENT_WARPS,
        num_stages=latent_stages(machine, q_TNL.dtype),
        enable_fp_fusion=not work.cut.is_fixed,
    )
    if work.bounds.merges:
        merge(out_TNV, parts_DNV, sums_DN2, work, kv.k_scale, machine.num_programs)
    return out_TNV


@kernel(do_not_specialize=["table_stride"])
def _latent_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    counts_ptr,
    items_ptr,
    tables_ptr,
    table_stride,
    factor,  # of products
    kv_scale,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    num_units = tl.load(counts_ptr) * NUM_PARTS
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item_ptr = items_ptr + unit // NUM_PARTS * 10
        part = unit % NUM_PARTS
        table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride
        _attend(
            q_ptr, kv_ptr, scales_ptr, out_ptr, parts_ptr, sums_ptr, item_ptr, table_ptr, part,
            factor, kv_scale, NUM_PARTS, GROUP, SIZE, VALUES, WIDTH, REST_WIDTH, ROW, BLOCK_SIZE,
            FORMAT, ROWS, TILE, CHUNK, DOT,
        )  # fmt: skip


@triton.jit
def _attend(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    item_ptr,
    table_ptr,
    part,
    factor,
    kv_scale,
    NUM_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute one item for a part of the heads in ROWS matrix rows: row m is token m // GROUP, head
    m % GROUP of the part. With CHUNK the cut is fixed, and chunks are merged in order."""
    NUM_HEADS: tl.constexpr = NUM_PARTS * GROUP
    count, position = tl.load(item_ptr + 2), tl.load(item_ptr + 3)
    first, end = tl.load(item_ptr + 4), tl.load(item_ptr + 5)
    m = tl.arange(0, ROWS)
    offset = m // GROUP
    used = offset < count
    # Of all [T, N] heads, where the tile begins, and its rows after that.
    begin = tl.load(item_ptr + 1).to(tl.int64) * NUM_HEADS + part * GROUP
    head = offset * NUM_HEADS + m % GROUP
    q_at = q_ptr + begin * SIZE + head * SIZE
    q = _queries(q_at, used, 0, VALUES, WIDTH)
    rest = _queries(q_at, used, VALUES, SIZE - VALUES, REST_WIDTH)
    if FORMAT == 2 and tl.float16 == DOT:
        exponent = tl.maximum(exponents_of(q), exponents_of(rest))
        q, rest = with_exponent_14(q, exponent), with_exponent_14(rest, exponent)
        factor = factor_of(exponent) * factor
    q, rest = q.to(DOT), rest.to(DOT)
    query = position + offset
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, WIDTH], tl.float32)
    if CHUNK > 0:
        for chunk in range(first // CHUNK * CHUNK, end, CHUNK):
            stop = tl.minimum(chunk + CHUNK, end)
            chunk_maximum, chunk_total, chunk_values = _scan(
                q, rest, factor, tl.full([ROWS], float("-inf"), tl.float32),
                tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32), kv_ptr,
                scales_ptr, table_ptr, tl.maximum(chunk, first), stop, stop, query, SIZE, VALUES,
                WIDTH, REST_WIDTH, ROW, BLOCK_SIZE, FORMAT, TILE, DOT, True,
            )  # fmt: skip
            maximum, total, values = merge_chunk(
                maximum, total, values, chunk_maximum, chunk_total, chunk_values
            )
    else:
        # [first, edge) needs no mask, [edge, end) the causal mask.
        edge = first
        if ROWS > 16:
            edge += tl.maximum(tl.minimum(end, position + 1) - first, 0) // TILE * TILE
            maximum, total, values = _scan(
                q, rest, factor, maximum, total, values, kv_ptr, scales_ptr,
                table_ptr, first, edge, end, query, SIZE, VALUES, WIDTH, REST_WIDTH, ROW,
                BLOCK_SIZE, FORMAT, TILE, DOT, False,
            )  # fmt: skip
        maximum, total, values = _scan(
            q, rest, factor, maximum, total, values, kv_ptr, scales_ptr, table_ptr,
            edge, end, end, query, SIZE, VALUES, WIDTH, REST_WIDTH, ROW, BLOCK_SIZE, FORMAT, TILE,
            DOT, True,
        )  # fmt: skip
    _store(
        values, maximum, total, out_ptr, parts_ptr, sums_ptr, item_ptr, part * GROUP, begin, head,
        offset, used, kv_scale, NUM_HEADS, VALUES, WIDTH, CHUNK > 0,
    )  # fmt: skip


@triton.jit
def _store(
    values,
    maximum,
    total,
    out_ptr,
    parts_ptr,
    sums_ptr,
    item_ptr,
    first_head,
    begin,
    head,
    offset,
    used,
    kv_scale,
    NUM_HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Store an item's result, or a part to merge, as attention_merge.py's store_item does. begin:
    where the tile begins among all [T, N] heads. head: [rows], after that. Addresses of 32 bits per
    row leave the registers that 512 values per row need."""
    h = tl.arange(0, WIDTH)
    columns = used[:, None] & (h < VALUES)[None, :]
    first_slot = tl.load(item_ptr + 6)
    if first_slot < 0:
        if FIXED:
            out = values * finished(total, kv_scale, used)[:, None]
        else:
            out = values * (kv_scale / tl.where(used, total, 1.0))[:, None]
        to = out_ptr + begin * VALUES + (head * VALUES)[:, None] + h[None, :]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=columns)
    elif tl.load(item_ptr + 4) < tl.load(item_ptr + 5):
        slot = first_slot.to(tl.int64) * NUM_HEADS + first_head
        head += offset * ((tl.load(item_ptr + 7) - 1) * NUM_HEADS)
        to = parts_ptr + slot * VALUES + (head * VALUES)[:, None] + h[None, :]
        tl.store(to, values, mask=columns)
        tl.store(sums_ptr + slot * 2 + head * 2, maximum, mask=used)
        tl.store(sums_ptr + slot * 2 + head * 2 + 1, total, mask=used)


@triton.jit
def _queries(q_at, used, FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Load the elements [FIRST, FIRST + COUNT) of queries, [rows, WIDTH]."""
    h = tl.arange(0, WIDTH)
    mask = used[:, None] & (h < COUNT)[None, :]
    return tl.load(q_at[:, None] + FIRST + h[None, :], mask=mask, other=0.0)


@triton.jit
def _keys(
    kv_ptr,
    slot,
    inside,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the elements [FIRST, FIRST + COUNT) of the slots' latent vectors, [slots, WIDTH]. With
    MASKED, slots that are not inside are 0."""
    h = tl.arange(0, WIDTH)
    at = kv_ptr + row_of(slot, SIZE, BLOCK_SIZE, ROW)[:, None] + FIRST + h[None, :]
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (h < COUNT)[None, :], other=0)
    elif WIDTH > COUNT:
        x = tl.load(at, mask=(h < COUNT)[None, :], other=0)
    else:
        x = tl.load(at)
    if FORMAT == 1:
        x = x.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    return x.to(DOT)


@triton.jit
def _scales(
    scales_ptr,
    block,
    key,
    end,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Load the int8 scales of consecutive keys; 0 for keys from `end` on."""
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    at = scale_of(slot, SIZE, BLOCK_SIZE, ROW)
    if BLOCK_SIZE % 4 == 0:
        # The first key is a multiple of 16, so four keys have 16 bytes of one block.
        at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    return tl.load(scales_ptr + at, mask=key < end, other=0.0)


@triton.jit
def _scan(
    q,
    rest,
    factor,
    maximum,
    total,
    values,
    kv_ptr,
    scales_ptr,
    table_ptr,
    first,
    last,
    end,
    query,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys [first, last), TILE at once. Keys exist before `end`. Without MASKED every
    query sees all of them."""
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DOT else "ieee"  # AMD has no tf32x3
    n = tl.arange(0, TILE)
    key = first + n
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
    if FORMAT == 1:
        scale = _scales(scales_ptr, block, key, end, SIZE, BLOCK_SIZE, ROW)
    for start in range(first, last, TILE):
        key = start + n
        inside = key < end
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        # Load the next keys' block ids one iteration early, so that the keys can be prefetched.
        key += TILE
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0)
        key -= TILE
        k = _keys(
            kv_ptr, slot, inside, 0, VALUES, WIDTH, SIZE, ROW, BLOCK_SIZE, FORMAT, DOT, MASKED
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SIZE > VALUES:
            k_rest = _keys(
                kv_ptr, slot, inside, VALUES, SIZE - VALUES, REST_WIDTH, SIZE, ROW, BLOCK_SIZE,
                FORMAT, DOT, MASKED,
            )  # fmt: skip
            scores = tl.dot(rest, tl.trans(k_rest), scores, input_precision=PRECISION)
        scores *= factor
        if FORMAT == 1:
            scores *= scale[None, :]
        if MASKED:
            scores = tl.where(
                inside[None, :] & (key[None, :] <= query[:, None]), scores, float("-inf")
            )
        larger = tl.maximum(maximum, tl.max(scores, 1))
        base = larger
        if MASKED:
            # A query that has seen no key yet has the maximum -inf; 0 keeps its weights at 0.
            base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(maximum - base)
        total = total * correction + tl.sum(weights, 1)
        if FORMAT == 1:
            weights *= scale[None, :]
        values = values * correction[:, None]
        values = tl.dot(weights.to(DOT), k, values, input_precision=PRECISION)
        maximum = larger
        if FORMAT == 1:
            # Loaded one iteration early as well. Triton would prefetch them by copies of 4 bytes.
            key += TILE
            scale = _scales(scales_ptr, block, key, end, SIZE, BLOCK_SIZE, ROW)
    return maximum, total, values


def config(
    num_heads: int,
    *,
    has_long: bool = False,
    kv_format: str = "auto",
    is_fixed: bool = False,
    sizes: tuple[int, int] = (576, 512),
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = HOPPER,
) -> Config:
    """Return a launch as `latent_attention` makes it on a machine, to compile it ahead of time.
    sizes: L and V."""
    q = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}[dtype]
    stored = q if kv_format == "auto" else "*u8"
    signature = {
        "q_ptr": q, "kv_ptr": stored, "scales_ptr": "*fp32" if kv_format == "int8" else stored,
        "out_ptr": q, "parts_ptr": "*fp32", "sums_ptr": "*fp32", "counts_ptr": "*i32",
        "items_ptr": "*i32", "tables_ptr": "*i32", "table_stride": "i32", "factor": "fp32",
        "kv_scale": "fp32",
    }  # fmt: skip
    cut = Cut(is_fixed=is_fixed).of_latents(num_heads, latent_rows(machine, dtype, kv_format))
    num_parts = num_heads // cut.group_size
    given = latent_constants(cut, dtype, num_parts, *sizes, 16, kv_format, machine)
    # Compiled ahead of time, even if this process interprets kernels.
    given |= {"DOT": DTYPES[torch.float16 if kv_format == "fp8" else dtype]}
    given |= {"ROWS": cut.long_rows if has_long else cut.short_rows}
    return Config(
        _latent_kernel,
        signature,
        given,
        num_warps=LATENT_WARPS,
        num_stages=latent_stages(machine, dtype),
        needs_wgmma=machine.has_warp_groups and given["ROWS"] >= 64,
    )


CONFIGS = [
    config(16),
    config(16, has_long=True),
    config(128),
    config(40, sizes=(288, 256)),
    config(16, kv_format="int8"),
    config(128, has_long=True, kv_format="int8"),
    config(16, is_fixed=True),
    config(16, kv_format="fp8"),
    config(128, has_long=True, kv_format="fp8"),
    config(128, kv_format="int8", is_fixed=True),
    config(16, kv_format="fp8", is_fixed=True),
]
