"""Attention of decoding rows that also rotates their heads and stores their keys: one launch.

A step in which each row has one token computes little with it. So the work of `rotary_write.py`
fits into the programs that attend, and a layer takes one launch less. Each program normalises and
rotates the queries of its item. The program whose item contains the row's own token rotates the
key, stores key and value, and begins its sums with them. It reads only earlier keys from memory,
so no program waits for another one's stores.

Therefore no row may read a block that another row of the step writes (AttentionStep.is_separate).
Queries and keys have the bits that `rotary_write.py` stores, unless norms sum squares in another
order. The own key's score is a sum in float32 and not part of a matrix product, so results
may differ in the last place.

Shape legend: as in `attention.py`, and M = N + 2 K heads.

Bound by memory, as attention is. Expected on an H200 (benchmarks/gpu/time_model.py): 1.0 us less
per layer than two launches.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import Scores
from quire.ops.kernels.attention.attention import LOG2_E, scan
from quire.ops.kernels.attention.attention_merge import (
    last_constants,
    merge,
    merge_last,
    store_item,
)
from quire.ops.kernels.attention.attention_plan import Cut, Work, first_seen
from quire.ops.kernels.attention.attention_tiles import (
    HOPPER,
    NUM_STAGES,
    SHORT_WARPS,
    Machine,
    constants,
)
from quire.ops.kernels.attention.attention_write import LayerKV
from quire.ops.kernels.launch import DTYPES, Config, kernel, overlaps, pdl_option, wait_if

MAX_HEAD_DIM = 128  # sums of larger heads and both halves of their queries would spill registers
MAX_ROWS = 16  # query heads of a KV head, for the same reason
MAX_MERGED_HEADS = 4  # at once, with fewer stages or large groups, for the same reason


@dataclass(frozen=True)
class Rotation:
    """Rotation of a step's heads. factors: float32 [T, 1, 2 H] of `rotary_rows`. weight: norms
    [N + K, H] with contiguous rows, or None without norms. slots_T: int64; -1 stores nothing."""

    factors: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    slots_T: torch.Tensor


def serves(kv: LayerKV, group_size: int, size: int) -> bool:
    """Return whether the kernel serves heads of this size, whose keys and values are stored in the
    dtype of queries."""
    return (
        kv.kv_format == "auto" and size <= MAX_HEAD_DIM and not size % 2 and group_size <= MAX_ROWS
    )


def rotary_attention(
    qkv_TMH: torch.Tensor,
    kv: LayerKV,
    rotation: Rotation,
    work: Work,
    scores: Scores,
    machine: Machine,
) -> torch.Tensor:
    """Rotate heads, store keys and values, and return attention of the step that `work` was cut
    from, [T, N, H]. Each row has one token. A token's heads must be contiguous in qkv."""
    num_tokens, num_all, size = qkv_TMH.shape
    num_kv_heads, num_heads = kv.num_heads, num_all - 2 * kv.num_heads
    assert qkv_TMH.stride()[1:] == (size, 1), f"heads must follow, got {qkv_TMH.stride()}"
    assert num_heads == num_kv_heads * work.cut.group_size, "the work was cut for other heads"
    assert not (work.has_long or work.cut.is_fixed) and work.ends_T is None
    out_TNH = qkv_TMH.new_empty(num_tokens, num_heads, size)
    shape_DN = (work.bounds.slots, num_heads)
    parts_DNH = torch.empty((*shape_DN, size), dtype=torch.float32, device=qkv_TMH.device)
    sums_DN2 = torch.empty((*shape_DN, 2), dtype=torch.float32, device=qkv_TMH.device)
    weight, cap, sinks_N = rotation.weight, scores.soft_cap, scores.sinks_N
    is_ahead = overlaps(qkv_TMH.device)
    _rotary_attention_kernel[(min(work.bounds.items * num_kv_heads, machine.num_programs),)](
        qkv_TMH,
        rotation.factors,
        qkv_TMH if weight is None else weight,
        rotation.slots_T,
        kv.k,
        kv.v,
        out_TNH,
        parts_DNH,
        sums_DN2,
        work.counts,
        work.items,
        work.table_SL,
        out_TNH if sinks_N is None else sinks_N,
        work.items if work.arrivals is None else work.arrivals,
        qkv_TMH.stride(0),
        rotation.factors.stride(0),
        0 if weight is None else weight.stride(0),
        work.table_SL.stride(0),
        kv.head_stride,
        rotation.eps,
        scores.scale / cap if cap is not None else scores.scale * LOG2_E,
        (cap or 0.0) * LOG2_E,
        **_constants(work.cut, qkv_TMH.dtype, num_kv_heads, size, kv.block_size),
        HAS_NORM=weight is not None,
        HAS_CAP=cap is not None,
        HAS_SINKS=sinks_N is not None,
        **_last_constants(work.cut, size, work.arrivals is not None, machine),
        AHEAD=is_ahead,
        num_warps=SHORT_WARPS,
        num_stages=machine.num_stages if qkv_TMH.dtype.itemsize < 4 else 2,
        **pdl_option(is_ahead),
    )
    if work.bounds.merges and work.arrivals is None:
        merge(out_TNH, parts_DNH, sums_DN2, work, 1.0, machine.num_programs)
    return out_TNH


def _constants(
    cut: Cut, dtype: torch.dtype, num_kv_heads: int, size: int, block_size: int
) -> dict[str, Any]:
    found = constants(cut, dtype, num_kv_heads, size, block_size, "auto")
    names = ("NUM_KV_HEADS", "GROUP", "HEAD_DIM", "WIDTH", "BLOCK_SIZE", "WINDOW", "DOT")
    sizes = {"ROWS": found["SHORT_ROWS"], "TILE": found["SHORT_TILE"]}
    return {name: found[name] for name in names} | sizes


def _last_constants(cut: Cut, size: int, merges_last: bool, machine: Machine) -> dict[str, int]:
    found = last_constants(cut, size, merges_last)
    has_few_registers = machine.has_warp_groups and cut.group_size > 8
    if machine.num_stages < NUM_STAGES or has_few_registers:
        found["LAST_HEADS"] = min(found["LAST_HEADS"], MAX_MERGED_HEADS)
    return found


@kernel(do_not_specialize=["table_stride"])
def _rotary_attention_kernel(
    qkv_ptr,
    factors_ptr,
    weight_ptr,
    slots_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    counts_ptr,
    items_ptr,
    tables_ptr,
    sinks_ptr,
    arrivals_ptr,
    qkv_token,  # elements from one token to the next
    factors_token,
    weight_head,
    table_stride,
    head_stride,
    eps,
    factor,  # of products; with a soft cap, already divided by it
    cap,  # soft cap times log2(e), the factor of tanh
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LAST_HEADS: tl.constexpr,
    LAST_AT_ONCE: tl.constexpr,  # 0: another launch merges the parts
    AHEAD: tl.constexpr,
):
    wait_if(AHEAD)
    for unit in range(tl.program_id(0), tl.load(counts_ptr) * NUM_KV_HEADS, tl.num_programs(0)):
        item_ptr = items_ptr + unit // NUM_KV_HEADS * 10
        head = unit % NUM_KV_HEADS
        kv_at = head.to(tl.int64) * head_stride
        _attend(
            qkv_ptr, factors_ptr, weight_ptr, slots_ptr, k_ptr + kv_at, v_ptr + kv_at, out_ptr,
            parts_ptr, sums_ptr, item_ptr,
            tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride, sinks_ptr, head, qkv_token,
            factors_token, weight_head, eps, factor, cap, NUM_KV_HEADS, GROUP, HEAD_DIM, WIDTH,
            BLOCK_SIZE, WINDOW, DOT, ROWS, TILE, HAS_NORM, HAS_CAP, HAS_SINKS,
        )  # fmt: skip
        if LAST_AT_ONCE > 0:
            merge_last(
                out_ptr, parts_ptr, sums_ptr, out_ptr, item_ptr, arrivals_ptr, head, 1.0,
                NUM_KV_HEADS, GROUP, HEAD_DIM, WIDTH, False, LAST_HEADS, LAST_AT_ONCE,
            )  # fmt: skip


@triton.jit
def _turned(
    x_ptr, weight_ptr, head, used, cos, sin, at, partner, weight_head, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Return heads [R, WIDTH] normalised and rotated, in float32, but rounded to their dtype after
    each operation. x_ptr: the token's heads. at: elements of a head. partner: for each of them the
    element that is rotated with it, in the other half."""
    dtype = x_ptr.dtype.element_ty
    mask = used[:, None] & (at < HEAD_DIM)[None, :]
    first = (head * HEAD_DIM)[:, None]
    x = tl.load(x_ptr + first + at[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(x_ptr + first + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        weights = weight_ptr + (head * weight_head)[:, None]
        of_x = tl.load(weights + at[None, :], mask=mask, other=0.0).to(tl.float32)
        of_y = tl.load(weights + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        x = (x * scale * of_x).to(dtype).to(tl.float32)
        y = (y * scale * of_y).to(dtype).to(tl.float32)
    return (x * cos + y * sin).to(dtype).to(tl.float32)


@triton.jit
def _attend(
    qkv_ptr, factors_ptr, weight_ptr, slots_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, sums_ptr,
    item_ptr, table_ptr, sinks_ptr, head, qkv_token, factors_token, weight_head, eps, factor,
    cap, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute one item of one KV head in ROWS matrix rows, of which row m is query head m."""
    token = tl.load(item_ptr + 1).to(tl.int64)
    position = tl.load(item_ptr + 3)
    first = tl.load(item_ptr + 4)
    end = tl.load(item_ptr + 5)
    has_own = (position < end) & (first < end)
    earlier_end = tl.minimum(end, position)
    m = tl.arange(0, ROWS)
    used = m < GROUP
    query_head = head * GROUP + m
    at = tl.arange(0, WIDTH)
    partner = tl.where(at < HEAD_DIM // 2, at + HEAD_DIM // 2, at - HEAD_DIM // 2)
    factors_at = factors_ptr + token * factors_token + at
    cos = tl.load(factors_at, mask=at < HEAD_DIM, other=0.0)[None, :]
    sin = tl.load(factors_at + HEAD_DIM, mask=at < HEAD_DIM, other=0.0)[None, :]  # -sin, then sin
    x_ptr = qkv_ptr + token * qkv_token
    q = _turned(
        x_ptr, weight_ptr, query_head, used, cos, sin, at, partner, weight_head, eps, HEAD_DIM,
        HAS_NORM,
    )  # fmt: skip
    # A tile of one row: the own key, and the value, which is not rotated.
    own = tl.arange(0, 1) + head
    is_read = has_own & (own >= 0)
    k = _turned(
        x_ptr, weight_ptr, NUM_KV_HEADS * GROUP + own, is_read, cos, sin, at, partner, weight_head,
        eps, HEAD_DIM, HAS_NORM,
    )  # fmt: skip
    columns = is_read[:, None] & (at < HEAD_DIM)[None, :]
    value_at = ((NUM_KV_HEADS * (GROUP + 1) + own) * HEAD_DIM)[:, None] + at[None, :]
    v = tl.load(x_ptr + value_at, mask=columns, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    stored = columns & (slot >= 0)
    tl.store(k_ptr + slot * HEAD_DIM + at[None, :], k.to(k_ptr.dtype.element_ty), mask=stored)
    tl.store(v_ptr + slot * HEAD_DIM + at[None, :], v, mask=stored)

    score = tl.sum(q * k, axis=1) * factor
    if HAS_CAP:
        score = cap - 2.0 * cap / (1.0 + tl.exp2(score * 2.8853900817779268))
    maximum = tl.where(has_own, score, float("-inf"))
    total = tl.zeros([ROWS], tl.float32) + tl.where(has_own, 1.0, 0.0)
    values = tl.zeros([ROWS, WIDTH], tl.float32) + v.to(tl.float32)
    lowest = tl.maximum(first_seen(position, WINDOW), 0) if WINDOW != 0 else 0
    if HAS_SINKS:
        # Count the sink once, in the chunk that begins where the row's keys do.
        sink = tl.load(
            sinks_ptr + query_head, mask=used & (first <= lowest), other=float("-inf")
        ).to(tl.float32) * 1.4426950408889634  # fmt: skip
        larger = tl.maximum(maximum, sink)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(maximum - base)
        total = total * weight + tl.exp2(sink - base)
        values *= weight[:, None]
        maximum = larger
    query = tl.zeros([ROWS], tl.int32) + position
    maximum, total, values = scan(
        q.to(DOT), maximum, total, values, k_ptr, v_ptr, k_ptr, v_ptr, table_ptr, first,
        earlier_end, lowest, earlier_end, query, query, factor, cap, HEAD_DIM, WIDTH, HEAD_DIM,
        BLOCK_SIZE, WINDOW, 0, HAS_CAP, TILE, DOT, True,
    )  # fmt: skip
    store_item(
        values, maximum, total, out_ptr, parts_ptr, sums_ptr, out_ptr, item_ptr, token, 0,
        query_head, used, 1.0, NUM_KV_HEADS * GROUP, HEAD_DIM, WIDTH, False, False,
    )  # fmt: skip


def config(
    size: int,
    group_size: int = 4,
    *,
    has_norm: bool = False,
    window: int = 0,
    has_cap: bool = False,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = HOPPER,
    merges_last: bool = False,
    is_ahead: bool = False,
) -> Config:
    """Return a launch as `rotary_attention` makes it on a machine, to compile it ahead of time."""
    x = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    signature = {
        "qkv_ptr": x, "factors_ptr": "*fp32", "weight_ptr": x, "slots_ptr": "*i64", "k_ptr": x,
        "v_ptr": x, "out_ptr": x, "parts_ptr": "*fp32", "sums_ptr": "*fp32", "counts_ptr": "*i32",
        "items_ptr": "*i32", "tables_ptr": "*i32", "sinks_ptr": "*fp32", "arrivals_ptr": "*i32",
        "qkv_token": "i32", "factors_token": "i32", "weight_head": "i32", "table_stride": "i32",
        "head_stride": "i64", "eps": "fp32", "factor": "fp32", "cap": "fp32",
    }  # fmt: skip
    cut = Cut().of_group(group_size, window, size)
    given = _constants(cut, dtype, 8, size, 16) | {"DOT": DTYPES[dtype], "HAS_NORM": has_norm}
    given |= {"HAS_CAP": has_cap, "HAS_SINKS": has_sinks}
    given |= _last_constants(cut, size, merges_last, machine) | {"AHEAD": is_ahead}
    return Config(
        _rotary_attention_kernel,
        signature,
        given,
        num_warps=SHORT_WARPS,
        num_stages=machine.num_stages,
        divisible=("qkv_token", "factors_token", "weight_head", "head_stride"),
    )


CONFIGS = [
    config(128),
    config(128, 2, has_norm=True),
    config(64, 8, window=128, has_cap=True, has_sinks=True),
    config(80, 1),
]
# Launches whose last program merges the parts, and launches that may overlap.
ARRIVING = [config(128, has_norm=True, merges_last=True)]
OVERLAPPING = [
    config(128, has_norm=True, merges_last=merges_last, is_ahead=True)
    for merges_last in (False, True)
]
