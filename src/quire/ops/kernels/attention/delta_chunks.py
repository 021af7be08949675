"""Compute the gated delta rule by matrix products over chunks of tokens, in numbers of 16 bits.
This form is for rows with more than a few tokens.

A chunk of C tokens begins with the memory M. Let G be the running sum of the decays' logarithms,
and b the strength with which each token is taken in. Let k and q be keys and queries, divided by
their lengths. The tokens' corrections U solve a triangular system (the UT transform; Yang et al.
2025). Its parts without M are computed for all chunks at once:

    A[i, j] = b[i] e^(G[i] - G[j]) k[i].k[j]  for j < i,      solve = (I + A)^-1 diag(b)
    reads[i, j] = e^(G[i] - G[j]) q[i].k[j]   for j <= i
    U = solve (V - e^G K M)
    out = e^G Q M + reads U
    M = e^G[C] M + (e^(G[C] - G) K)^T U

`_solve_kernel` has a program for each chunk and value head. It stores `solve`, `reads`, G and the
reciprocal lengths of a chunk. `_scan_kernel` takes a row's chunks in order. Each program holds TILE
columns of a head's memory in registers. It writes the memory after each block that needs it, also
within a chunk. Chunks are cut from a row's first token on. So a row's bits depend on where its
sequence was cut, but not on other rows. Nothing depends on lengths known to the host.

Accuracy. Keys, queries and values are multiplied as stored; lengths divide the products afterwards.
Each float32 operand becomes the sum of two numbers of 16 bits. This loses 2^-16 of it in bfloat16,
and 2^-22 in float16 (and 3e-8), which then holds up to 131,008. The inverse is computed by
elimination in squares of 16 tokens, and by products of squares. Powers of A would cancel each
other, since its entries are near 1 where keys repeat. For float32 numbers each product would become
three and take more registers than there are. Such rows go token by token.

Expected on an H200 for 2048 tokens of one row and 32 heads of 128 x 128: `_solve_kernel` has 2048
programs, about 20 us. `_scan_kernel` has 128 programs of 64 dependent chunks, perhaps 1.4 us each,
90 us. All products together are 17 GFLOP, 22 us at the full rate. The 17 MB moved between the two
kernels stay in the L2 cache.

Shape legend: T tokens, C tokens of a chunk, K key heads, N value heads, D and E the sizes of their
vectors, S rows, B blocks, Z a state's numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import DeltaHeads
from quire.ops.kernels.attention.delta_rule import (
    DIVISIBLE,
    NEXT_80B,
    check,
    constants,
    gates_of,
    load_memory,
    memory_at,
    signature,
)
from quire.ops.kernels.attention.states import StateStep, find_row
from quire.ops.kernels.launch import DTYPES, Config, kernel, next_power_of_2

SQUARE = 16  # tokens of a chunk that are eliminated one after another
PARTS = 4  # of `solve` and `reads`, each as two numbers of 16 bits


@dataclass(frozen=True)
class Chunks:
    """Sizes of the form in chunks. tokens: of a chunk, 16, 32 or 64. tile: columns of a program.
    few: rows with up to this many tokens go token by token."""

    tokens: int = 32
    tile: int = 32
    few: int = 8


@triton.jit
def _inverse(below, C: tl.constexpr, SQUARE: tl.constexpr):
    """Return (I + below)^-1 of a matrix [C, C] that is 0 on and above its diagonal."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    is_near = i // SQUARE == j // SQUARE
    near = tl.where(is_near, below, 0.0)
    found = tl.where(i == j, 1.0, 0.0)
    for p in range(SQUARE - 1):
        column = tl.sum(tl.where(j % SQUARE == p, near, 0.0), axis=1)
        line = tl.sum(tl.where(i % SQUARE == p, found, 0.0), axis=0)
        found -= tl.where(is_near, column[:, None] * line[None, :], 0.0)
    # Let F = found (below - near), which is 0 in squares on the diagonal and above. The inverse
    # is (I + F)^-1 found, and (I + F)^-1 = (I - F) (I + F^2), since F^4 is 0.
    if C > SQUARE:
        far = tl.dot(found, below - near, input_precision="tf32x3")
        found -= tl.dot(far, found, input_precision="tf32x3")
        if C > 2 * SQUARE:
            far = tl.dot(far, far, input_precision="tf32x3")
            found += tl.dot(far, found, input_precision="tf32x3")
    return found


@triton.jit
def _parts(x, PART: tl.constexpr):
    """Split x into two numbers of 16 bits whose sum is as near to x as possible."""
    is_narrow: tl.constexpr = tl.float16 == PART
    if is_narrow:
        x = tl.minimum(tl.maximum(x, -131008.0), 131008.0)
        high = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(PART)
    else:
        high = x.to(PART)
    return high, (x - high.to(tl.float32)).to(PART)


@kernel(do_not_specialize=["num_rows", "num_tokens", "max_tokens"])
def _solve_kernel(
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    shift_ptr,
    starts_ptr,
    squares_ptr,
    vectors_ptr,
    num_rows,
    num_tokens,
    qkv_stride,
    gates_stride,
    max_tokens,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    SQUARE: tl.constexpr,
    PARTS: tl.constexpr,
):
    head = tl.program_id(0)
    row, first = find_row(starts_ptr, num_rows, tl.program_id(1), C, ROWS)
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(starts_ptr + row + 1) - start.to(tl.int32)
    if (first >= count) | (count <= max_tokens):
        return
    # Offsets within a tile are counted from its first token.
    token, i, d = start + first, tl.arange(0, C), tl.arange(0, DEPTH)
    inside = i < count - first
    key_ptr = qkv_ptr + token * qkv_stride + head // (VALUES // KEYS) * D
    at = i[:, None] * qkv_stride + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    q = tl.load(key_ptr + at, mask=mask, other=0.0)
    k = tl.load(key_ptr + KEYS * D + at, mask=mask, other=0.0)
    exact_q, exact_k = q.to(tl.float32), k.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(exact_q * exact_q, axis=1) + 1e-6) * (D**-0.5)
    k_scale = tl.rsqrt(tl.sum(exact_k * exact_k, axis=1) + 1e-6)
    gate_at = gates_ptr + token * gates_stride + head + i * gates_stride
    strength = tl.load(gate_at, mask=inside, other=0.0)
    time = tl.load(gate_at + VALUES, mask=inside, other=0.0)
    rate, shift = tl.load(rate_ptr + head), tl.load(shift_ptr + head)
    taken, stays = gates_of(strength, time, rate, shift, gates_ptr)
    # e^-100 is 0; after larger sums the next terms would lose their digits.
    sums = tl.cumsum(tl.where(inside, tl.maximum(stays, -100.0), 0.0), axis=0)

    is_seen = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], float("-inf")))
    decay *= k_scale[None, :]
    reads = tl.dot(q, tl.trans(k)) * decay * q_scale[:, None]
    keys = tl.dot(k, tl.trans(k)) * decay * (taken * k_scale)[:, None]
    below = tl.where(i[:, None] > i[None, :], keys, 0.0)
    solve = _inverse(below, C, SQUARE) * taken[None, :]

    part: tl.constexpr = squares_ptr.dtype.element_ty
    square_ptr = squares_ptr + (token * VALUES + head) * (PARTS * C)
    square_at = i[:, None] * (VALUES * PARTS * C) + i[None, :]
    solve_high, solve_low = _parts(solve, part)
    reads_high, reads_low = _parts(reads, part)
    tl.store(square_ptr + square_at, solve_high, mask=inside[:, None])
    tl.store(square_ptr + C + square_at, solve_low, mask=inside[:, None])
    tl.store(square_ptr + 2 * C + square_at, reads_high, mask=inside[:, None])
    tl.store(square_ptr + 3 * C + square_at, reads_low, mask=inside[:, None])
    vector = vectors_ptr + head * num_tokens + token + i
    step = VALUES * num_tokens
    tl.store(vector, sums, mask=inside)
    tl.store(vector + step, q_scale, mask=inside)
    tl.store(vector + 2 * step, k_scale, mask=inside)


@triton.jit
def _add_product(total, a, b):
    """Return total + a b, where a has 16 bits and the others are float32."""
    high, low = _parts(b, a.dtype)
    return tl.dot(a, high, tl.dot(a, low, total))


@triton.jit
def _add_square_times(total, square, b, inside, C: tl.constexpr):
    """Return total + a b, where `square` points to the two parts of a."""
    a_high = tl.load(square, mask=inside[:, None], other=0.0)
    a_low = tl.load(square + C, mask=inside[:, None], other=0.0)
    high, low = _parts(b, a_high.dtype)
    return tl.dot(a_high, high, tl.dot(a_high, low, tl.dot(a_low, high, total)))


@triton.jit
def _advance(memory, k, taken, sums, k_scale, i, num_taken):
    """Return the memory after `num_taken` tokens of a chunk, from the memory before the chunk."""
    total = tl.sum(tl.where(i == num_taken - 1, sums, 0.0), axis=0)
    weight = tl.exp(tl.where(i < num_taken, total - sums, float("-inf"))) * k_scale
    return _add_product(memory * tl.exp(total), tl.trans(k), taken * weight[:, None])


@triton.jit
def _leave(
    memory, keys_at, mask, taken, sums, k_scale, i, states_ptr, left_ptr, before, first, last,
    count, state_size, memory_offset, head, d, e, D: tl.constexpr, E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the memory after each block that needs it and ends within a chunk, or with the row.

    The chunk has the row's tokens [first, last), and `memory` is the memory before it. The keys are
    loaded again. If the loop's keys were used, Triton (3.6) would let the next chunk's keys arrive
    before the conditional code is done.
    """
    index = (before + first) // BLOCK_SIZE
    entry = index + tl.arange(0, ENTRIES)
    end = tl.minimum((entry + 1) * BLOCK_SIZE - before, count)
    blocks = tl.load(left_ptr + entry, mask=entry * BLOCK_SIZE < before + last, other=-1)
    if tl.max(tl.where(end <= last, blocks, -1), axis=0) >= 0:
        inside = (d < D)[:, None] & (e < E)[None, :]
        k = tl.load(keys_at, mask=mask, other=0.0)
        for n in range(ENTRIES):
            num_taken = tl.minimum((index + n + 1) * BLOCK_SIZE - before, count) - first
            block = tl.max(tl.where(entry == index + n, blocks, -1), axis=0).to(tl.int64)
            if (num_taken <= last - first) & (block >= 0):
                left = _advance(memory, k, taken, sums, k_scale, i, num_taken)
                to = memory_at(states_ptr, block, state_size, memory_offset, head, d, e, D, E)
                tl.store(to, left, mask=inside)


@kernel(do_not_specialize=["num_tokens", "table_stride", "max_tokens"])
def _scan_kernel(
    qkv_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    left_ptr,
    squares_ptr,
    vectors_ptr,
    num_tokens,
    qkv_stride,
    state_size,
    memory_offset,
    table_stride,
    max_tokens,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    C: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
):
    tiles: tl.constexpr = (E + TILE - 1) // TILE
    head, row = tl.program_id(0) // tiles, tl.program_id(1)
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(starts_ptr + row + 1) - start.to(tl.int32)
    if count <= max_tokens:
        return
    before = tl.load(contexts_ptr + row) - count
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    left_ptr += row.to(tl.int64) * table_stride
    i, d = tl.arange(0, C), tl.arange(0, DEPTH)
    e = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside_memory = (d < D)[:, None] & (e < E)[None, :]
    memory = load_memory(
        states_ptr, table_ptr, before, state_size, memory_offset, head, d, e, inside_memory, D, E,
        BLOCK_SIZE,
    )  # fmt: skip
    # Offsets within a tile are counted from its first token.
    key_at = head // (VALUES // KEYS) * D + i[:, None] * qkv_stride + d[None, :]
    value_at = 2 * KEYS * D + head * E + i[:, None] * qkv_stride + e[None, :]
    out_at = head * E + i[:, None] * (VALUES * E) + e[None, :]
    square_at = head * (PARTS * C) + i[:, None] * (VALUES * PARTS * C) + i[None, :]
    step = VALUES * num_tokens
    nothing = tl.zeros([C, TILE], tl.float32)
    for first in range(0, count, C):
        token, inside = start + first, i < count - first
        line = qkv_ptr + token * qkv_stride
        mask = inside[:, None] & (d < D)[None, :]
        q = tl.load(line + key_at, mask=mask, other=0.0)
        k = tl.load(line + KEYS * D + key_at, mask=mask, other=0.0)
        v_mask = inside[:, None] & (e < E)[None, :]
        v = tl.load(line + value_at, mask=v_mask, other=0.0)
        vector = vectors_ptr + head * num_tokens + token + i
        sums = tl.load(vector, mask=inside, other=0.0)
        q_scale = tl.load(vector + step, mask=inside, other=0.0)
        k_scale = tl.load(vector + 2 * step, mask=inside, other=0.0)

        stays, square = tl.exp(sums), squares_ptr + token * (VALUES * PARTS * C) + square_at
        wrong = v.to(tl.float32)
        wrong -= _add_product(nothing, k, memory) * (stays * k_scale)[:, None]
        taken = _add_square_times(nothing, square, wrong, inside, C)
        read = _add_product(nothing, q, memory) * (stays * q_scale)[:, None]
        read = _add_square_times(read, square + 2 * C, taken, inside, C)
        out = out_ptr + token * (VALUES * E)
        tl.store(out + out_at, read.to(out_ptr.dtype.element_ty), mask=v_mask)

        last = tl.minimum(first + C, count)
        _leave(
            memory, line + KEYS * D + key_at, mask, taken, sums, k_scale, i, states_ptr, left_ptr,
            before, first, last, count, state_size, memory_offset, head, d, e, D, E, BLOCK_SIZE,
            ENTRIES,
        )  # fmt: skip
        memory = _advance(memory, k, taken, sums, k_scale, i, last - first)


def delta_chunks(
    qkv_TC: torch.Tensor,
    gates_TG: torch.Tensor,
    rate_N: torch.Tensor,
    shift_N: torch.Tensor,
    heads: DeltaHeads,
    states_BZ: torch.Tensor,
    step: StateStep,
    out_TNE: torch.Tensor,
    chunks: Chunks,
) -> None:
    """Write what `delta_rule` computes to out [T, N, E], for rows with more than `chunks.few`
    tokens. The arguments are the same, but qkv has 16 bits."""
    check(qkv_TC, gates_TG, rate_N, shift_N, heads, states_BZ, out_TNE)
    assert qkv_TC.dtype.itemsize == 2, f"numbers of 16 bits, not {qkv_TC.dtype}"
    num_tokens, size = len(qkv_TC), chunks.tokens
    squares = qkv_TC.new_empty(num_tokens, heads.values, PARTS, size)
    vectors = rate_N.new_empty(3, heads.values, num_tokens)
    shared = constants(heads, step.block_size) | {"C": size, "PARTS": PARTS}
    _solve_kernel[(heads.values, num_tokens // size + step.num_rows)](
        qkv_TC,
        gates_TG,
        rate_N,
        shift_N,
        step.starts,
        squares,
        vectors,
        step.num_rows,
        num_tokens,
        qkv_TC.stride(0),
        gates_TG.stride(0),
        chunks.few,
        **shared,
        ROWS=step.width,
        SQUARE=SQUARE,
        num_warps=4,
        num_stages=2,
    )
    tiles = triton.cdiv(heads.value_dim, chunks.tile)
    _scan_kernel[(heads.values * tiles, step.num_rows)](
        qkv_TC,
        states_BZ,
        out_TNE,
        step.starts,
        step.contexts,
        step.tables,
        step.stored,
        squares,
        vectors,
        num_tokens,
        qkv_TC.stride(0),
        states_BZ.stride(0),
        states_BZ.shape[1] - heads.memory_size,
        step.tables.stride(0),
        chunks.few,
        **shared,
        ENTRIES=_entries(size, step.block_size),
        TILE=chunks.tile,
        num_warps=4,
        num_stages=2,
    )


def _entries(tokens: int, block_size: int) -> int:
    """Return a power of 2 that bounds the number of blocks which a chunk of tokens overlaps."""
    return next_power_of_2((tokens + block_size - 2) // block_size + 1)


def _config(kernel: Any, dtype: torch.dtype, values: dict[str, int]) -> Config:
    types = signature(str(DTYPES[dtype])) | {"vectors_ptr": "*fp32"}
    types |= {"squares_ptr": f"*{DTYPES[dtype]}", "num_rows": "i32", "num_tokens": "i32"}
    types = {name: types[name] for name in kernel.arg_names if name in types}
    divisible = tuple(name for name in DIVISIBLE if name in types)
    return Config(kernel, types, values, num_warps=4, num_stages=2, divisible=divisible)


def _configs(dtype: torch.dtype) -> list[Config]:
    chunks = Chunks()
    size = chunks.tokens
    shared = constants(NEXT_80B, 16) | {"C": size, "PARTS": PARTS}
    scan = {"ENTRIES": _entries(size, 16), "TILE": chunks.tile}
    return [
        _config(_solve_kernel, dtype, shared | {"ROWS": 32, "SQUARE": SQUARE}),
        _config(_scan_kernel, dtype, shared | scan),
    ]


CONFIGS = [config for dtype in (torch.bfloat16, torch.float16) for config in _configs(dtype)]
