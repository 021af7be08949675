"""Normalise, rotate and store heads between the projection and attention, in one launch.

The launch normalises each query and key head (Qwen3), rotates them, and writes keys and values into
blocks. A program handles up to 8 heads of one kind of one token. Queries go to a tensor of their
own, keys and values to the token's slot. Separate operations would take three or four launches and
write and read queries and keys twice more.

Bound by memory: 2 (N + 2 K) H elements and 4 H bytes of factors per token. Expected on an H200, at
4.3 TB/s: 12 us for 2048 tokens of Llama-3.1-8B in bfloat16; the time of a launch for a few tokens.

Shape legend: T tokens, N query heads, K KV heads, M = N + 2 K, H head dim, E = H / 2, B blocks, P
tokens per block. Each half of a head is a tile [heads, E], so that element e of the first half and
element e of the second, which are rotated together, are in the same thread.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.kernels.attention.attention_write import FORMATS, store_heads
from quire.ops.kernels.launch import Config, kernel, next_power_of_2, overlaps, pdl_option

TILE = 512  # elements of each half in a program, 8 for each of 64 threads
INT8_SCALE_BYTES = 4  # of an int8 row, after a block's rows


@triton.jit
def _halves(x_ptr, offset, mask, HALF: tl.constexpr):
    """Load both halves of heads as float32. offset, mask: of the first half."""
    first = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _rounded(x, like_ptr):
    """Round x to the dtype that the pointer has, and return it as float32."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(first, second, weight_ptr, weight_at, mask, eps, like_ptr, HALF: tl.constexpr):
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    first_weight, second_weight = _halves(weight_ptr, weight_at, mask, HALF)
    first, second = first * scale * first_weight, second * scale * second_weight
    return _rounded(first, like_ptr), _rounded(second, like_ptr)


@triton.jit
def _turned(first, second, factors_ptr, at, HALF: tl.constexpr):
    """Rotate heads by a token's factors (cos, cos, -sin, sin), each of them for one half of a head.

    The factors are loaded for each head, from the nearest cache. To share them, heads would have to
    pass them through shared memory.
    """
    at = tl.broadcast_to(at[None, :], first.shape)
    cos = tl.load(factors_ptr + at, mask=at < HALF, other=0.0)
    sin = tl.load(factors_ptr + 3 * HALF + at, mask=at < HALF, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@kernel()
def _rotary_write_kernel(
    qkv_ptr,
    factors_ptr,
    slots_ptr,
    weight_ptr,
    q_ptr,
    kv_ptr,
    num_heads,
    num_kv_heads,
    qkv_token,  # elements from one token to the next
    factors_token,
    weight_head,
    kv_kind,  # elements from keys to values
    kv_head,
    eps,
    k_inverse,
    v_inverse,
    HAS_NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # elements of a block of kv per token
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        gdc_wait()
        gdc_launch_dependents()
    # A token's tiles: first the queries' tiles, then the keys', then the values'.
    q_tiles, kv_tiles = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    num_tiles = q_tiles + 2 * kv_tiles
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    slot = tl.load(slots_ptr + token).to(tl.int64)
    is_query, is_value = tile < q_tiles, tile >= q_tiles + kv_tiles
    # For the program's kind: the first tile, the first head in qkv, the number of heads.
    first_tile, first_head, num_of_kind = 0, 0, num_heads
    if not is_query:
        first_tile, first_head, num_of_kind = q_tiles, num_heads, num_kv_heads
    if is_value:
        first_tile, first_head = q_tiles + kv_tiles, num_heads + num_kv_heads
    head = (tile - first_tile) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, WIDTH)
    # A token of padding has no slot, and its query is never used.
    head_mask = (head < num_of_kind) & (is_query | (slot >= 0))
    mask = head_mask[:, None] & (at < HALF)[None, :]

    x_at = (first_head + head)[:, None] * (2 * HALF) + at[None, :]
    first, second = _halves(qkv_ptr + token * qkv_token, x_at, mask, HALF)
    if not is_value:
        weight_at = (first_head + head)[:, None] * weight_head + at[None, :]
        if HAS_NORM:
            first, second = _normed(first, second, weight_ptr, weight_at, mask, eps, qkv_ptr, HALF)
        first, second = _turned(first, second, factors_ptr + token * factors_token, at, HALF)
    # Round to the dtype before storing, as the separate operations do.
    first, second = _rounded(first, qkv_ptr), _rounded(second, qkv_ptr)

    if is_query:
        out_at = token * num_heads * (2 * HALF) + head[:, None] * (2 * HALF) + at[None, :]
        tl.store(q_ptr + out_at, first.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_ptr + out_at + HALF, second.to(q_ptr.dtype.element_ty), mask=mask)
    else:
        head_at = head.to(tl.int64) * kv_head + is_value.to(tl.int64) * kv_kind
        inverse = tl.where(is_value, v_inverse, k_inverse)
        store_heads(
            kv_ptr, head_at, slot, at, first, second, mask, head_mask, inverse, HALF, BLOCK_SIZE,
            ROW, FORMAT,
        )  # fmt: skip


def rotary_write(
    qkv_TMH: torch.Tensor,
    rows: torch.Tensor,
    slots_T: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return the queries [T, N, H], normalised and rotated; store the keys, treated likewise, and
    the values.

    Args:
        qkv_TMH: queries, keys and values; a token's heads must be contiguous.
        rows: factors [T, 1, 2 H] of `quire.ops.rotary.rotary_rows`, float32.
        slots_T: int64 or int32, block * P + offset. -1 marks padding: nothing is stored, and the
            query is meaningless.
        kv: a layer's [2, K, B, P, row], each head's blocks contiguous. In qkv's dtype or
            float8_e4m3fn rows have H numbers. In uint8 they have H bytes of int8, and each block
            has its float32 scales after its rows (attention_write.py).
        weight: [N + K, H] with contiguous rows, of the norm with eps; None for no norm.
        k_scale, v_scale: divisors of numbers stored as float8_e4m3fn, which saturate at 448.
    """
    num_tokens, num_all, size = qkv_TMH.shape
    num_kv_heads = kv.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    _check(qkv_TMH, rows, slots_T, kv, weight)
    q_TNH, is_ahead = qkv_TMH.new_empty(num_tokens, num_heads, size), overlaps(qkv_TMH.device)
    width = next_power_of_2(size // 2)
    heads = _heads(width, num_heads)
    num_tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if num_tokens == 0:
        return q_TNH
    _rotary_write_kernel[(num_tokens * num_tiles,)](
        qkv_TMH,
        rows,
        slots_T,
        qkv_TMH if weight is None else weight,
        q_TNH,
        kv,
        num_heads,
        num_kv_heads,
        qkv_TMH.stride(0),
        rows.stride(0),
        0 if weight is None else weight.stride(0),
        kv.stride(0),
        kv.stride(1),
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        HAS_NORM=weight is not None,
        FORMAT=FORMATS[_kv_format(kv)],
        HALF=size // 2,
        BLOCK_SIZE=kv.shape[3],
        ROW=kv.shape[-1],
        WIDTH=width,
        HEADS=heads,
        AHEAD=is_ahead,
        num_warps=_num_warps(width, heads),
        **pdl_option(is_ahead),
    )
    return q_TNH


def _check(
    qkv_TMH: torch.Tensor,
    rows: torch.Tensor,
    slots_T: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor | None,
) -> None:
    num_tokens, num_all, size = qkv_TMH.shape
    kv_format = _kv_format(kv)
    row = size + (INT8_SCALE_BYTES if kv_format == "int8" else 0)
    assert size % 2 == 0 and qkv_TMH.stride()[1:] == (size, 1), "heads must be contiguous"
    assert kv_format != "auto" or kv.dtype == qkv_TMH.dtype, f"no KV format {kv.dtype}"
    assert kv_format != "int8" or size % 4 == 0, "the scale of an int8 row must be aligned"
    assert kv.shape[0] == 2 and kv.shape[-1] == row, f"needs rows of {row}, got {kv.shape}"
    assert kv.stride()[2:] == (kv.shape[3] * row, row, 1), "blocks must be contiguous"
    assert rows.shape == (num_tokens, 1, 2 * size) and rows.dtype == torch.float32
    assert rows.stride(2) == 1 and len(slots_T) == num_tokens and slots_T.is_contiguous()
    if weight is not None:
        assert weight.shape == (num_all - kv.shape[1], size) and weight.stride(1) == 1


def _kv_format(kv: torch.Tensor) -> str:
    return {torch.uint8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv.dtype, "auto")


def _heads(width: int, num_heads: int) -> int:
    return min(max(1, TILE // width), next_power_of_2(num_heads))


def _num_warps(width: int, heads: int) -> int:
    """Return so many warps that each thread has 16 bytes of 16-bit elements of each half."""
    return max(1, width * heads // 256)


_SIGNATURE = {
    "qkv_ptr": "*bf16",
    "factors_ptr": "*fp32",
    "slots_ptr": "*i64",
    "weight_ptr": "*bf16",
    "q_ptr": "*bf16",
    "num_heads": "i32",
    "num_kv_heads": "i32",
    "qkv_token": "i32",
    "factors_token": "i32",
    "weight_head": "i32",
    "kv_kind": "i64",
    "kv_head": "i32",
    "eps": "fp32",
    "k_inverse": "fp32",
    "v_inverse": "fp32",
}


def _config(size: int, kv_format: str, has_norm: bool, **constants: int) -> Config:
    width = next_power_of_2(size // 2)
    return Config(
        _rotary_write_kernel,
        _SIGNATURE | {"kv_ptr": {"auto": "*bf16", "int8": "*u8", "fp8": "*fp8e4nv"}[kv_format]},
        {
            "HAS_NORM": has_norm,
            "FORMAT": FORMATS[kv_format],
            "HALF": size // 2,
            "BLOCK_SIZE": 16,
            "ROW": size + (INT8_SCALE_BYTES if kv_format == "int8" else 0),
            "WIDTH": width,
            "HEADS": _heads(width, 32),
            "AHEAD": False,
            **constants,
        },
        num_warps=_num_warps(width, _heads(width, 32)),
        divisible=("qkv_token", "factors_token", "weight_head", "kv_kind", "kv_head"),
    )


CONFIGS = [
    *(
        _config(128, kv_format, norm)
        for kv_format in ("auto", "int8", "fp8")
        for norm in (False, True)
    ),
    *(_config(size, "auto", False) for size in (64, 80, 96, 256)),
    _config(256, "auto", True),
    _config(128, "auto", True, num_kv_heads=1),  # Triton compiles a 1 as a constant
]
OVERLAPPING = [_config(128, kv_format, True, AHEAD=True) for kv_format in ("auto", "int8")]
