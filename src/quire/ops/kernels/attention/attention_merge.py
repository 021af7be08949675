"""Merge parts of attention: results of separate chunks of a token's keys.

Shape legend: N query heads, H head dim, D slots of parts.

A part is (maximum of the scores times log2(e), sum of weights, weighted sum of values). An empty
part is (-inf, 0, 0). The usual merge combines all parts of a token at once. Under a fixed cut,
parts are merged one after the other. `_ordered_kernel` does this for chunks of different programs,
and attention.py's loop for chunks of one program. Both call `merge_chunk` and are compiled without
fusing products and sums, so both give the same bits. An empty part changes nothing, and a part
merged into an empty one stays unchanged.

Expected on an H200, not measured: 256 tokens of 32 heads of 128 numbers, with 8 parts each, read 34
MB in 8 us.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.attention.attention_plan import Cut, Work
from quire.ops.kernels.launch import Config, next_power_of_2

MERGE_WARPS = 4
ORDERED_HEADS = 4  # heads of a program
AT_ONCE = 8  # parts that are loaded together


@triton.jit
def merge_chunk(maximum, total, values, chunk_maximum, chunk_total, chunk_values):
    """Merge the next chunk into the running maximum [R], sum [R] and values [R, width]."""
    larger = tl.maximum(maximum, chunk_maximum)
    base = tl.where(larger == float("-inf"), 0.0, larger)
    before = tl.exp2(maximum - base)
    added = tl.exp2(chunk_maximum - base)
    total = tl.fma(total, before, chunk_total * added)
    values = values * before[:, None] + chunk_values * added[:, None]
    return larger, total, values


@triton.jit
def before_chunks(sinks_ptr, query_head, used, HAS_SINKS: tl.constexpr):
    """Return the maximum and sum [R] before the first chunk: the sinks with HAS_SINKS, else -inf
    and 0."""
    maximum = tl.full(query_head.shape, float("-inf"), tl.float32)
    total = tl.zeros(query_head.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + query_head, mask=used, other=float("-inf"))
        maximum = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
        total = tl.where(used, 1.0, 0.0)
    return maximum, total


@triton.jit
def finished(total, v_scale, used):
    """Return the factor [R] that turns merged values into the result: v_scale / total."""
    return tl.div_rn(tl.zeros_like(total) + v_scale, tl.where(used, total, 1.0))


@triton.jit
def store_item(
    values,
    maximum,
    total,
    out_ptr,
    parts_ptr,
    sums_ptr,
    kept_ptr,
    item_ptr,
    token,
    offset,
    query_head,
    used,
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Store an item's result if the item is the only one of its tile; otherwise store a part to
    merge."""
    h = tl.arange(0, WIDTH)
    columns = used[:, None] & (h < HEAD_DIM)[None, :]
    first_slot = tl.load(item_ptr + 6)
    if first_slot < 0:
        to = out_ptr + ((token * NUM_HEADS + query_head) * HEAD_DIM)[:, None] + h[None, :]
        if FIXED:
            out = values * finished(total, v_scale, used)[:, None]
        else:
            out = values * (v_scale / tl.where(used, total, 1.0))[:, None]
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=columns)
        if KEEPS:
            softmax_at = kept_ptr + (token * NUM_HEADS + query_head) * 2
            tl.store(softmax_at, maximum, mask=used)
            tl.store(softmax_at + 1, total, mask=used)
    elif tl.load(item_ptr + 4) < tl.load(item_ptr + 5):
        slot = first_slot.to(tl.int64) + offset * tl.load(item_ptr + 7)
        part = slot * NUM_HEADS + query_head
        tl.store(parts_ptr + (part * HEAD_DIM)[:, None] + h[None, :], values, mask=columns)
        tl.store(sums_ptr + part * 2, maximum, mask=used)
        tl.store(sums_ptr + part * 2 + 1, total, mask=used)


def merge(
    out_TNH: torch.Tensor,
    parts_DNH: torch.Tensor,
    sums_DN2: torch.Tensor,
    work: Work,
    v_scale: float,
    num_programs: int,
    sinks_N: torch.Tensor | None = None,
    sums_TN2: torch.Tensor | None = None,
) -> None:
    """Merge the parts of the tokens that `work` lists, and write their results into out [T, N, H].

    sinks_N: only for a fixed cut; otherwise a part contains them. sums_TN2: as in `attention`.
    """
    _, num_heads, size = out_TNH.shape
    tensors = (out_TNH, parts_DNH, sums_DN2, work.counts, work.merges)
    shared = {"NUM_HEADS": num_heads, "HEAD_DIM": size, "WIDTH": next_power_of_2(size)}
    shared["KEEPS"] = sums_TN2 is not None
    softmax = out_TNH if sums_TN2 is None else sums_TN2
    if not work.cut.is_fixed:
        _merge_kernel[(min(work.bounds.merges * num_heads, 8 * num_programs),)](
            *tensors,
            softmax,
            v_scale,
            **shared,
            SPLITS=next_power_of_2(work.cut.max_splits),
            num_warps=MERGE_WARPS,
        )
        return
    units = work.bounds.merges * triton.cdiv(num_heads, ORDERED_HEADS)
    _ordered_kernel[(min(units, 8 * num_programs),)](
        *tensors,
        softmax,
        out_TNH if sinks_N is None else sinks_N,
        v_scale,
        **shared,
        HEADS=ORDERED_HEADS,
        AT_ONCE=AT_ONCE,
        HAS_SINKS=sinks_N is not None,
        num_warps=MERGE_WARPS,
        enable_fp_fusion=False,
    )


@triton.jit
def _merge_kernel(
    out_ptr,
    parts_ptr,
    sums_ptr,
    counts_ptr,
    merges_ptr,
    kept_ptr,
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge all parts of a token and a head at once."""
    num_units = tl.load(counts_ptr + 1) * NUM_HEADS
    h = tl.arange(0, WIDTH)
    split = tl.arange(0, SPLITS)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        merge_ptr = merges_ptr + unit // NUM_HEADS * 4
        head = unit % NUM_HEADS
        token = tl.load(merge_ptr).to(tl.int64)
        slot = tl.load(merge_ptr + 1).to(tl.int64)
        inside = split < tl.load(merge_ptr + 2)
        part = (slot + split) * NUM_HEADS + head
        maximum = tl.load(sums_ptr + part * 2, mask=inside, other=float("-inf"))
        total = tl.load(sums_ptr + part * 2 + 1, mask=inside, other=0.0)
        largest = tl.max(maximum, 0)
        weights = tl.exp2(maximum - largest)
        at = (part * HEAD_DIM)[:, None] + h[None, :]
        mask = inside[:, None] & (h < HEAD_DIM)[None, :]
        values = tl.load(parts_ptr + at, mask=mask, other=0.0)
        total = tl.sum(total * weights, 0)
        value = tl.sum(values * weights[:, None], 0) / total * v_scale
        if KEEPS:
            softmax_at = kept_ptr + (token * NUM_HEADS + head) * 2
            tl.store(softmax_at, largest)
            tl.store(softmax_at + 1, total)
        out_at = (token * NUM_HEADS + head) * HEAD_DIM + h
        tl.store(out_ptr + out_at, value.to(out_ptr.dtype.element_ty), mask=h < HEAD_DIM)


@triton.jit
def _ordered_kernel(
    out_ptr,
    parts_ptr,
    sums_ptr,
    counts_ptr,
    merges_ptr,
    kept_ptr,
    sinks_ptr,
    v_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge parts one after the other, for a token and HEADS heads; any number of parts."""
    groups = tl.cdiv(NUM_HEADS, HEADS)
    num_units = tl.load(counts_ptr + 1) * groups
    h = tl.arange(0, WIDTH)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        merge_ptr = merges_ptr + unit // groups * 4
        head = unit % groups * HEADS + tl.arange(0, HEADS)
        used = head < NUM_HEADS
        token = tl.load(merge_ptr).to(tl.int64)
        slot = tl.load(merge_ptr + 1).to(tl.int64)
        num_parts = tl.load(merge_ptr + 2)
        maximum, total = before_chunks(sinks_ptr, head, used, HAS_SINKS)
        values = tl.zeros([HEADS, WIDTH], tl.float32)
        for first in range(0, num_parts, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                # Parts after the last one are loaded as empty.
                exists = used & (first + i < num_parts)
                part = (slot + first + i) * NUM_HEADS + head
                part_maximum = tl.load(sums_ptr + part * 2, mask=exists, other=float("-inf"))
                part_total = tl.load(sums_ptr + part * 2 + 1, mask=exists, other=0.0)
                at = (part * HEAD_DIM)[:, None] + h[None, :]
                mask = exists[:, None] & (h < HEAD_DIM)[None, :]
                part_values = tl.load(parts_ptr + at, mask=mask, other=0.0)
                maximum, total, values = merge_chunk(
                    maximum, total, values, part_maximum, part_total, part_values
                )
        if KEEPS:
            softmax_at = kept_ptr + (token * NUM_HEADS + head) * 2
            tl.store(softmax_at, maximum, mask=used)
            tl.store(softmax_at + 1, total, mask=used)
        values *= finished(total, v_scale, used)[:, None]
        out_at = ((token * NUM_HEADS + head) * HEAD_DIM)[:, None] + h[None, :]
        mask = used[:, None] & (h < HEAD_DIM)[None, :]
        tl.store(out_ptr + out_at, values.to(out_ptr.dtype.element_ty), mask=mask)


_SIGNATURE = {
    "out_ptr": "*bf16", "parts_ptr": "*fp32", "sums_ptr": "*fp32", "counts_ptr": "*i32",
    "merges_ptr": "*i32", "kept_ptr": "*fp32", "v_scale": "fp32",
}  # fmt: skip


def _configs(size: int) -> list[Config]:
    shared = {"NUM_HEADS": 32, "HEAD_DIM": size, "WIDTH": size, "KEEPS": size == 128}
    ordered = shared | {"HEADS": ORDERED_HEADS, "AT_ONCE": AT_ONCE, "HAS_SINKS": size == 64}
    return [
        Config(_merge_kernel, _SIGNATURE, shared | {"SPLITS": Cut.max_splits}, MERGE_WARPS),
        Config(
            _ordered_kernel, _SIGNATURE | {"sinks_ptr": "*fp32"}, ordered, num_warps=MERGE_WARPS
        ),
    ]


CONFIGS = [config for size in (64, 128, 256) for config in _configs(size)]
