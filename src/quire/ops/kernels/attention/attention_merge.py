"""Merge parts of attention: results of separate chunks of a token's keys.

Shape legend: N query heads, H head dim, D slots of parts.

A part is (maximum of the scores times log2(e), sum of weights, weighted sum of values). An empty
part is (-inf, 0, 0). The usual merge combines AT_ONCE parts of a token at once, in their order. A
launch of its own does this (`merge`), or the program that stores a tile's last part (`merge_last`).
Both call `merge_parts` with the same shapes and warps, so both give the same bits.

Under a fixed cut, parts are merged one after the other. `_ordered_kernel` does this for chunks of
different programs, and attention.py's loop for chunks of one program. Both call `merge_chunk` and
are compiled without fusing products and sums, so both give the same bits. An empty part changes
nothing, and a part merged into an empty one stays unchanged.

Expected on an H200, not measured: 256 tokens of 32 heads of 128 numbers, with 8 parts each, read 34
MB in 8 us.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.attention.attention_plan import Cut, Work
from quire.ops.kernels.launch import (
    Config,
    arrives_last,
    kernel,
    next_power_of_2,
    overlaps,
    pdl_option,
    wait_if,
)

MERGE_WARPS, WIDE_WARPS = 4, 8  # of heads with up to 256 values, and with more
MERGED_NUMBERS = 512  # sums of a program: four of each thread
MERGED_AT_ONCE = 8  # parts of a group, which are added to each other before the earlier groups
MERGED_GROUPS = 4  # groups that a launch of its own loads together
ORDERED_HEADS = 4  # heads of a program under a fixed cut
AT_ONCE = 8  # parts that a program loads together under a fixed cut


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
def _load_parts(
    parts_ptr, sums_ptr, slot, i, head, used, num_parts,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the parts i [P] of a token and the heads [R]: values [R, P, WIDTH], maxima and sums
    [R, P]. In this order Triton gives each warp a head, and each thread all parts of four numbers.
    Parts after the last one are loaded as empty."""
    h = tl.arange(0, WIDTH)
    part = (slot + i)[None, :] * NUM_HEADS + head[:, None]
    exists = (i < num_parts)[None, :] & used[:, None]
    at = (part * HEAD_DIM)[:, :, None] + h[None, None, :]
    mask = exists[:, :, None] & (h < HEAD_DIM)[None, None, :]
    values = tl.load(parts_ptr + at, mask=mask, other=0.0)
    maximum = tl.load(sums_ptr + part * 2, mask=exists, other=float("-inf"))
    total = tl.load(sums_ptr + part * 2 + 1, mask=exists, other=0.0)
    return values, maximum, total


@triton.jit
def merge_parts(
    parts_ptr, sums_ptr, slot, head, used, num_parts,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Merge a token's parts in the slots from `slot` on, AT_ONCE at a time, in their order. Return
    the maximum [R], sum [R] and values [R, WIDTH] of the heads [R]. GROUPS times AT_ONCE parts are
    loaded together, which does not change any bit."""
    maximum = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    values = tl.zeros([head.shape[0], WIDTH], tl.float32)
    for first in range(0, num_parts, GROUPS * AT_ONCE):
        loaded = ()
        for group in tl.static_range(GROUPS):
            i = first + group * AT_ONCE + tl.arange(0, AT_ONCE)
            part = _load_parts(
                parts_ptr, sums_ptr, slot, i, head, used, num_parts, NUM_HEADS, HEAD_DIM, WIDTH
            )
            loaded = loaded + (part,)
        for group in tl.static_range(GROUPS):
            part_values, part_maximum, part_total = loaded[group]
            larger = tl.maximum(maximum, tl.max(part_maximum, 1))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            before = tl.exp2(maximum - base)
            weights = tl.exp2(part_maximum - base[:, None])
            total = total * before + tl.sum(part_total * weights, 1)
            values = values * before[:, None] + tl.sum(part_values * weights[:, :, None], 1)
            maximum = larger
    return maximum, total, values


@triton.jit
def _store_merged(
    maximum, total, values, out_ptr, kept_ptr, token, head, used, v_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Store a token's results of the heads [R]."""
    h = tl.arange(0, WIDTH)
    if KEEPS:
        softmax_at = kept_ptr + (token * NUM_HEADS + head) * 2
        tl.store(softmax_at, maximum, mask=used)
        tl.store(softmax_at + 1, total, mask=used)
    values *= finished(total, v_scale, used)[:, None]
    out_at = ((token * NUM_HEADS + head) * HEAD_DIM)[:, None] + h[None, :]
    mask = used[:, None] & (h < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_at, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_last(
    out_ptr,
    parts_ptr,
    sums_ptr,
    kept_ptr,
    item_ptr,
    arrivals_ptr,
    kv_head,
    v_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the parts of an item's tile if the item's part is the last that was stored. The caller
    has stored the item of this KV head."""
    row = tl.load(item_ptr)
    token = tl.load(item_ptr + 1).to(tl.int64)
    count = tl.load(item_ptr + 2)
    has_keys = tl.load(item_ptr + 4) < tl.load(item_ptr + 5)
    is_part = (tl.load(item_ptr + 6) >= 0) & has_keys
    chunks = tl.load(item_ptr + 7)
    slot = tl.load(item_ptr + 8).to(tl.int64)
    num_parts = tl.load(item_ptr + 9)
    if is_part:  # noqa: SIM102 (a condition with `and` would count every item)
        if arrives_last(arrivals_ptr + row * NUM_KV_HEADS + kv_head, num_parts):
            groups = tl.cdiv(GROUP, HEADS)
            for unit in range(count * groups):
                offset = unit // groups
                of_group = unit % groups * HEADS + tl.arange(0, HEADS)
                used = of_group < GROUP
                head = kv_head * GROUP + of_group
                maximum, total, values = merge_parts(
                    parts_ptr, sums_ptr, slot + offset * chunks, head, used, num_parts,
                    NUM_KV_HEADS * GROUP, HEAD_DIM, WIDTH, AT_ONCE, 1,
                )  # fmt: skip
                _store_merged(
                    maximum, total, values, out_ptr, kept_ptr, token + offset, head, used, v_scale,
                    NUM_KV_HEADS * GROUP, HEAD_DIM, WIDTH, KEEPS,
                )  # fmt: skip


def merged_heads(group_size: int, size: int) -> int:
    """Return the number of heads, of a size, whose parts a program merges at once."""
    width = max(16, next_power_of_2(size))
    return min(next_power_of_2(group_size), max(1, MERGED_NUMBERS // width))


def last_constants(cut: Cut, size: int, merges_last: bool) -> dict[str, int]:
    """Return the constants of `merge_last` in attention's launch for heads of a size. LAST_AT_ONCE
    is 0 if it merges nothing."""
    return {
        "LAST_HEADS": merged_heads(cut.group_size, size),
        "LAST_AT_ONCE": MERGED_AT_ONCE if merges_last else 0,
    }


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
    heads = ORDERED_HEADS if work.cut.is_fixed else merged_heads(work.cut.group_size, size)
    units = work.bounds.merges * triton.cdiv(num_heads, heads)
    if not work.cut.is_fixed:
        _merge_kernel[(min(units, 8 * num_programs),)](
            *tensors,
            softmax,
            v_scale,
            **shared,
            HEADS=heads,
            AT_ONCE=MERGED_AT_ONCE,
            GROUPS=MERGED_GROUPS,
            AHEAD=overlaps(out_TNH.device),
            num_warps=_num_warps(size),
            **pdl_option(overlaps(out_TNH.device)),
        )
        return
    _ordered_kernel[(min(units, 8 * num_programs),)](
        *tensors,
        softmax,
        out_TNH if sinks_N is None else sinks_N,
        v_scale,
        **shared,
        HEADS=heads,
        AT_ONCE=AT_ONCE,
        HAS_SINKS=sinks_N is not None,
        num_warps=_num_warps(size),
        enable_fp_fusion=False,
    )


def _num_warps(size: int) -> int:
    return MERGE_WARPS if size <= 256 else WIDE_WARPS


@kernel()
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
    HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Merge all parts of a token and HEADS heads."""
    wait_if(AHEAD)
    groups = tl.cdiv(NUM_HEADS, HEADS)
    num_units = tl.load(counts_ptr + 1) * groups
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        merge_ptr = merges_ptr + unit // groups * 4
        head = unit % groups * HEADS + tl.arange(0, HEADS)
        used = head < NUM_HEADS
        token = tl.load(merge_ptr).to(tl.int64)
        slot = tl.load(merge_ptr + 1).to(tl.int64)
        maximum, total, values = merge_parts(
            parts_ptr, sums_ptr, slot, head, used, tl.load(merge_ptr + 2), NUM_HEADS, HEAD_DIM,
            WIDTH, AT_ONCE, GROUPS,
        )  # fmt: skip
        _store_merged(
            maximum, total, values, out_ptr, kept_ptr, token, head, used, v_scale, NUM_HEADS,
            HEAD_DIM, WIDTH, KEEPS,
        )  # fmt: skip


@kernel()
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
        _store_merged(
            maximum, total, values, out_ptr, kept_ptr, token, head, used, v_scale, NUM_HEADS,
            HEAD_DIM, WIDTH, KEEPS,
        )  # fmt: skip


_SIGNATURE = {
    "out_ptr": "*bf16", "parts_ptr": "*fp32", "sums_ptr": "*fp32", "counts_ptr": "*i32",
    "merges_ptr": "*i32", "kept_ptr": "*fp32", "v_scale": "fp32",
}  # fmt: skip


def _shared(size: int) -> dict[str, int]:
    return {"NUM_HEADS": 32, "HEAD_DIM": size, "WIDTH": size, "KEEPS": size == 128}


def _merge_config(size: int, *, is_ahead: bool = False) -> Config:
    constants = _shared(size) | {"AHEAD": is_ahead}
    constants |= {
        "HEADS": merged_heads(4, size),
        "AT_ONCE": MERGED_AT_ONCE,
        "GROUPS": MERGED_GROUPS,
    }
    return Config(_merge_kernel, _SIGNATURE, constants, _num_warps(size))


def _configs(size: int) -> list[Config]:
    shared = _shared(size)
    ordered = shared | {"HEADS": ORDERED_HEADS, "AT_ONCE": AT_ONCE, "HAS_SINKS": size == 64}
    return [
        _merge_config(size),
        Config(
            _ordered_kernel,
            _SIGNATURE | {"sinks_ptr": "*fp32"},
            ordered,
            num_warps=_num_warps(size),
        ),
    ]


CONFIGS = [config for size in (64, 128, 256, 512) for config in _configs(size)]
OVERLAPPING = [_merge_config(128, is_ahead=True)]
