"""Compute the gated delta rule token by token: for rows with one or a few tokens, and for
`--deterministic`.

A program holds TILE columns of a value head's memory in the registers of one warp. It takes a row's
tokens in order, and writes the memory after each block that needs it. A token's result depends only
on the token and the memory before it, computed in one order. So its bits are the same in any batch
and however a sequence was cut. `delta_chunks.py` handles rows with more than `max_tokens` tokens.
Nothing depends on lengths known to the host, so the launch can be captured.

Decoding is bound by memory: each row's memory is read and written, 8 D E bytes per head. Expected
on an H200, at 4.3 TB/s: 62 us for 64 rows of 32 heads of 128 x 128. One row takes 8 us (256
programs, each with 8 KB in flight). Longer rows are bound by the sequential work of a warp: perhaps
0.7 us per token, 1.4 ms for 2048.

Shape legend: T tokens, K key heads, N value heads, D and E the sizes of their vectors, S rows, L
longest block table, P tokens per block, B blocks, Z a state's numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.attention_inputs import DeltaHeads
from quire.ops.kernels.attention.states import StateStep, state_before
from quire.ops.kernels.launch import Config, kernel, next_power_of_2

TILE = 16  # columns of a program
EVERY_LENGTH = 2**31 - 1


@triton.jit
def gates_of(strength, time, rate, shift, like_ptr):
    """Return the strength with which a token is taken in, and the logarithm of the memory's decay.

    The sigmoid is rounded to the dtype of `like_ptr`, as in the reference.
    """
    strength, time = strength.to(tl.float32), time.to(tl.float32) + shift
    taken = (1.0 / (1.0 + tl.exp(-strength))).to(like_ptr.dtype.element_ty).to(tl.float32)
    # log(1 + e^x); beyond 20 this is x itself in float32
    grown = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.where(time > 20.0, 0.0, time))))
    return taken, -rate * grown


@triton.jit
def memory_at(
    states_ptr, block, state_size, memory_offset, head, d, e, D: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    """Return the addresses [d, e] of a head's memory in a block's state."""
    at = states_ptr + block * state_size + memory_offset + head * (D * E)
    return at + d[:, None] * E + e[None, :]


@triton.jit
def load_memory(
    states_ptr, table_ptr, before, state_size, memory_offset, head, d, e, inside,
    D: tl.constexpr, E: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load a head's memory [d, e] after `before` tokens of a row. It may then be overwritten in
    place."""
    past = state_before(table_ptr, before, BLOCK_SIZE)
    at = memory_at(states_ptr, past, state_size, memory_offset, head, d, e, D, E)
    memory = tl.load(at, mask=inside & (past >= 0), other=0.0)
    tl.debug_barrier()
    return memory


@triton.jit
def _load_token(
    qkv_ptr, gates_ptr, token, end, qkv_stride, gates_stride, head, d, e, KEYS: tl.constexpr,
    VALUES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Load a token's query, key, value, strength and time unchanged; zeros after the row's end."""
    inside = token < end
    qkv_ptr += token * qkv_stride
    gates_ptr += token * gates_stride + head
    key_at = head // (VALUES // KEYS) * D + d
    q = tl.load(qkv_ptr + key_at, mask=inside & (d < D), other=0.0)
    k = tl.load(qkv_ptr + KEYS * D + key_at, mask=inside & (d < D), other=0.0)
    v = tl.load(qkv_ptr + 2 * KEYS * D + head * E + e, mask=inside & (e < E), other=0.0)
    strength = tl.load(gates_ptr, mask=inside, other=0.0)
    time = tl.load(gates_ptr + VALUES, mask=inside, other=0.0)
    return q, k, v, strength, time


@kernel(do_not_specialize=["table_stride", "max_tokens"])
def _recurrent_kernel(
    qkv_ptr,
    gates_ptr,
    rate_ptr,
    shift_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    left_ptr,
    qkv_stride,
    gates_stride,
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
    TILE: tl.constexpr,
):
    # Consecutive programs have the columns of one row's memory.
    tiles: tl.constexpr = (E + TILE - 1) // TILE
    head, row = tl.program_id(0) // tiles, tl.program_id(1)
    start = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.load(starts_ptr + row + 1).to(tl.int64)
    if (start >= end) | (end - start > max_tokens):
        return
    to_position = tl.load(contexts_ptr + row) - end  # add this to a token's index in the step
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    left_ptr += row.to(tl.int64) * table_stride
    d, e = tl.arange(0, DEPTH), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = (d < D)[:, None] & (e < E)[None, :]
    memory = load_memory(
        states_ptr, table_ptr, start + to_position, state_size, memory_offset, head, d, e, inside,
        D, E, BLOCK_SIZE,
    )  # fmt: skip
    rate, shift = tl.load(rate_ptr + head), tl.load(shift_ptr + head)
    raw_q, raw_k, raw_v, strength, time = _load_token(
        qkv_ptr, gates_ptr, start, end, qkv_stride, gates_stride, head, d, e, KEYS, VALUES, D, E
    )
    for token in range(start, end):
        q, k, v = raw_q.to(tl.float32), raw_k.to(tl.float32), raw_v.to(tl.float32)
        taken, stays = gates_of(strength, time, rate, shift, gates_ptr)
        # Load the next token meanwhile.
        raw_q, raw_k, raw_v, strength, time = _load_token(
            qkv_ptr, gates_ptr, token + 1, end, qkv_stride, gates_stride, head, d, e, KEYS,
            VALUES, D, E,
        )  # fmt: skip
        q *= tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (D**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        memory *= tl.exp(stays)
        wrong = v - tl.sum(memory * k[:, None], axis=0)
        memory += k[:, None] * (wrong * taken)[None, :]
        read = tl.sum(memory * q[:, None], axis=0)
        out_at = out_ptr + (token * VALUES + head) * E + e
        tl.store(out_at, read.to(out_ptr.dtype.element_ty), mask=e < E)
        num_computed = token + to_position + 1
        if (num_computed % BLOCK_SIZE == 0) | (token + 1 == end):
            block = tl.load(left_ptr + (num_computed - 1) // BLOCK_SIZE).to(tl.int64)
            to = memory_at(states_ptr, block, state_size, memory_offset, head, d, e, D, E)
            tl.store(to, memory, mask=inside & (block >= 0))


def delta_rule(
    qkv_TC: torch.Tensor,
    gates_TG: torch.Tensor,
    rate_N: torch.Tensor,
    shift_N: torch.Tensor,
    heads: DeltaHeads,
    states_BZ: torch.Tensor,
    step: StateStep,
    out_TNE: torch.Tensor,
    max_tokens: int = EVERY_LENGTH,
    is_fixed: bool = False,
) -> None:
    """Compute `AttentionBackend.delta_rule` into out [T, N, E], for rows with up to `max_tokens`
    tokens.

    qkv_TC, gates_TG: the stride between rows may exceed their width. rate_N, shift_N: float32.
    states_BZ: float32, of all blocks, each ending with the memory. out_TNE: contiguous. is_fixed:
    whether no product may be fused with a sum; by default compilers fuse some.
    """
    check(qkv_TC, gates_TG, rate_N, shift_N, heads, states_BZ, out_TNE)
    tiles = triton.cdiv(heads.value_dim, TILE)
    _recurrent_kernel[(heads.values * tiles, step.num_rows)](
        qkv_TC,
        gates_TG,
        rate_N,
        shift_N,
        states_BZ,
        out_TNE,
        step.starts,
        step.contexts,
        step.tables,
        step.stored,
        qkv_TC.stride(0),
        gates_TG.stride(0),
        states_BZ.stride(0),
        states_BZ.shape[1] - heads.memory_size,
        step.tables.stride(0),
        max_tokens,
        **constants(heads, step.block_size),
        TILE=TILE,
        num_warps=1,
        enable_fp_fusion=not is_fixed,
    )


def check(
    qkv_TC: torch.Tensor,
    gates_TG: torch.Tensor,
    rate_N: torch.Tensor,
    shift_N: torch.Tensor,
    heads: DeltaHeads,
    states_BZ: torch.Tensor,
    out_TNE: torch.Tensor,
) -> None:
    """Assert that tensors have the shapes, dtypes and strides that the kernels need; qkv is [T,
    channels]."""
    num_tokens = len(qkv_TC)
    assert qkv_TC.shape == (num_tokens, heads.channels) and qkv_TC.stride(1) == 1
    assert gates_TG.shape == (num_tokens, 2 * heads.values) and gates_TG.stride(1) == 1
    assert rate_N.dtype == shift_N.dtype == torch.float32, "of the type that sums are made in"
    assert rate_N.is_contiguous() and shift_N.is_contiguous()
    assert states_BZ.dtype == torch.float32 and states_BZ.stride(1) == 1
    assert out_TNE.is_contiguous()
    assert out_TNE.shape == (num_tokens, heads.values, heads.value_dim)


def constants(heads: DeltaHeads, block_size: int) -> dict[str, int]:
    """Return the compile-time constants of kernels over these heads."""
    return {
        "KEYS": heads.keys,
        "VALUES": heads.values,
        "D": heads.key_dim,
        "E": heads.value_dim,
        "BLOCK_SIZE": block_size,
        "DEPTH": max(16, next_power_of_2(heads.key_dim)),
    }


NEXT_80B = DeltaHeads(16, 32, 128, 128)  # Qwen3-Next-80B-A3B
DIVISIBLE = ("qkv_stride", "gates_stride", "state_size", "memory_offset")


def signature(dtype: str) -> dict[str, str]:
    """Return Triton's types of the arguments that describe a layer and a step."""
    pointers = dict.fromkeys(("qkv_ptr", "gates_ptr", "out_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("rate_ptr", "shift_ptr", "states_ptr"), "*fp32")
    pointers |= dict.fromkeys(("starts_ptr", "contexts_ptr", "tables_ptr", "left_ptr"), "*i32")
    return pointers | dict.fromkeys((*DIVISIBLE, "table_stride", "max_tokens"), "i32")


def _config(dtype: str, heads: DeltaHeads = NEXT_80B) -> Config:
    values: dict[str, Any] = constants(heads, 16) | {"TILE": TILE}
    return Config(_recurrent_kernel, signature(dtype), values, num_warps=1, divisible=DIVISIBLE)


CONFIGS = [
    _config("bf16"),
    _config("fp16"),
    _config("fp32"),
    _config("bf16", DeltaHeads(16, 16, 128, 128)),
]
