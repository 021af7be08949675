"""Write the keys and values of a step into blocks: one program per token.

Shape legend: T tokens, K KV heads, H head dim, B blocks, P tokens per block. The keys and the
values of a layer are [K, B, P, H] each, or [K, B, P, H + 4] bytes if they are stored as int8. A
block of int8 holds all its rows, then their scales, so that rows can be loaded 16 bytes at a time:

    P rows of H bytes | P scales, float32

Each number is read once and written once, 2 KB per token of Llama-3.1-8B. Expected to take the time
of a launch while decoding, and the time to move the bytes for prompt chunks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2

# Numbers of the formats in kernels. fp8 is e4m3, with one scale per layer.
FORMATS = {"auto": 0, "int8": 1, "fp8": 2}


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of a layer in memory. k, v: [K, B, P, row], uint8 for the formats int8 and
    fp8. k_scales, v_scales: float32 views of the same memory for int8; otherwise k and v. k_scale,
    v_scale: factors of stored fp8 numbers."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    kv_format: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        return self.k.shape[0]

    @property
    def head_stride(self) -> int:
        return self.k.stride(0)

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def row(self) -> int:
        """Elements of a block per token, with an int8 row's scale."""
        return self.k.shape[3]


def layer_kv(
    kv_2KBPH: torch.Tensor, kv_format: str, k_scale: float = 1.0, v_scale: float = 1.0
) -> LayerKV:
    """Return a layer's keys and values as views of its memory, [2, K, B, P, row]. Of latent
    vectors, [1, 1, B, P, row], both are the vectors."""
    k, v = kv_2KBPH[0], kv_2KBPH[-1]
    scales = (k.view(torch.float32), v.view(torch.float32)) if kv_format == "int8" else (k, v)
    return LayerKV(k, v, *scales, kv_format, k_scale, v_scale)


def write_kv(kv: LayerKV, k_TKH: torch.Tensor, v_TKH: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store the keys and values [T, K, H] of T tokens in slots [T] (block * P + offset).

    Slot -1 stores nothing. The last dimension of k and v must be contiguous, and a token's heads
    must follow each other.
    """
    _write(kv, k_TKH, v_TKH, slots_T, has_values=True)


def write_latents(kv: LayerKV, latent_TL: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store the latent vectors [T, L] of T tokens in slots [T], as `write_kv` does."""
    latent_T1L = latent_TL[:, None]
    _write(kv, latent_T1L, latent_T1L, slots_T, has_values=False)


def _write(
    kv: LayerKV,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    has_values: bool,
) -> None:
    num_tokens, num_heads, size = k_TKH.shape
    if num_tokens == 0:
        return
    assert size % 2 == 0, f"needs heads of an even size, got {size}"
    assert len(slots_T) == len(v_TKH) == num_tokens, "one key and one value per slot"
    for x_TKH in (k_TKH, v_TKH):
        is_contiguous = x_TKH.stride(2) == 1 and (num_heads == 1 or x_TKH.stride(1) == size)
        assert is_contiguous, f"heads must follow, got {x_TKH.stride()}"
    tile = next_power_of_2(num_heads) * next_power_of_2(size)
    _write_kernel[(num_tokens,)](
        k_TKH,
        v_TKH,
        kv.k,
        kv.v,
        slots_T,
        k_TKH.stride(0),
        v_TKH.stride(0),
        kv.head_stride,
        1.0 / kv.k_scale,
        1.0 / kv.v_scale,
        NUM_HEADS=num_heads,
        HEADS=next_power_of_2(num_heads),
        HALF=size // 2,
        WIDTH=next_power_of_2(size // 2),
        BLOCK_SIZE=kv.block_size,
        ROW=kv.row,
        FORMAT=FORMATS[kv.kv_format],
        HAS_VALUES=has_values,
        num_warps=_num_warps(tile),
    )


def _num_warps(tile: int) -> int:
    return min(8, max(1, tile // 512))


@triton.jit
def row_of(slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr):
    """Return where the rows of slots begin in a head's memory, in elements."""
    if ROW > HEAD_DIM:
        return slot * HEAD_DIM + slot // BLOCK_SIZE * (BLOCK_SIZE * (ROW - HEAD_DIM))
    return slot * HEAD_DIM


@triton.jit
def scale_of(slot, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr):
    """Return where the scales of int8 slots are in a head's memory, in float32 numbers."""
    first = slot // BLOCK_SIZE * (BLOCK_SIZE * ROW // 4) + BLOCK_SIZE * HEAD_DIM // 4
    return first + slot % BLOCK_SIZE


@triton.jit
def store_heads(
    kv_ptr,
    head_at,
    slot,
    at,
    first,
    second,
    mask,
    head_mask,
    inverse,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store one token's heads in rows of kv. first, second: halves [heads, E], valid where `mask`
    is set.

    head_at: [heads], where each head's blocks begin. at: [E], elements of a half. inverse:
    reciprocal of the fp8 scale. Values are rounded to nearest and saturate at fp8's largest number;
    NaN stays NaN.
    """
    row_at = head_at + row_of(slot, 2 * HALF, BLOCK_SIZE, ROW)
    offset = row_at[:, None] + at[None, :]
    dtype = kv_ptr.dtype.element_ty
    if FORMAT == 1:
        first, second = first.to(tl.float32), second.to(tl.float32)
        # Compare as bits: they sort like the magnitudes, and a NaN is the largest.
        first_bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        second_bits = second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.maximum(first_bits, second_bits), axis=1).to(tl.float32, bitcast=True)
        # The factor of a smaller maximum would overflow; such values are stored as 0.
        factor = tl.where(largest < 1e-30, 0.0, 127.0 / largest)[:, None]
        # Adding 1.5 * 2^23 leaves the rounded number in the lowest bits.
        first = (first * factor + 12582912.0).to(tl.int32, bitcast=True)
        second = (second * factor + 12582912.0).to(tl.int32, bitcast=True)
        scales_ptr = kv_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        scale_at = head_at // 4 + scale_of(slot, 2 * HALF, BLOCK_SIZE, ROW)
        tl.store(scales_ptr + scale_at, largest / 127.0, mask=head_mask)
    elif FORMAT == 2:
        first, second = _as_fp8(first, inverse, dtype), _as_fp8(second, inverse, dtype)
    tl.store(kv_ptr + offset, first.to(dtype), mask=mask)
    tl.store(kv_ptr + offset + HALF, second.to(dtype), mask=mask)


@triton.jit
def _as_fp8(x, inverse, dtype: tl.constexpr):
    """Convert x to e4m3, saturated, and return its bits as an 8-bit dtype, such as uint8."""
    x = x.to(tl.float32) * inverse
    x = tl.where(tl.abs(x) > 448.0, tl.where(x < 0.0, -448.0, 448.0), x)
    return x.to(tl.float8e4nv).to(dtype, bitcast=True)


@kernel()
def _write_kernel(
    k_ptr,
    v_ptr,
    to_k_ptr,
    to_v_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    head_stride,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        _write_token(
            k_ptr + token * k_stride, to_k_ptr, slot, head_stride, k_inverse,
            NUM_HEADS, HEADS, HALF, WIDTH, BLOCK_SIZE, ROW, FORMAT,
        )  # fmt: skip
        if HAS_VALUES:
            _write_token(
                v_ptr + token * v_stride, to_v_ptr, slot, head_stride, v_inverse,
                NUM_HEADS, HEADS, HALF, WIDTH, BLOCK_SIZE, ROW, FORMAT,
            )  # fmt: skip


@triton.jit
def _write_token(
    from_ptr,
    to_ptr,
    slot,
    head_stride,
    inverse,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
):
    head, at = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    head_mask = head < NUM_HEADS
    mask = head_mask[:, None] & (at < HALF)[None, :]
    x_ptr = from_ptr + head[:, None] * (2 * HALF) + at[None, :]
    first = tl.load(x_ptr, mask=mask, other=0.0)
    second = tl.load(x_ptr + HALF, mask=mask, other=0.0)
    store_heads(
        to_ptr, head.to(tl.int64) * head_stride, slot, at, first, second, mask, head_mask, inverse,
        HALF, BLOCK_SIZE, ROW, FORMAT,
    )  # fmt: skip


@triton.jit
def load_rows(
    rows_ptr,
    slot,
    inside,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the rows of the slots, [slots, WIDTH]. With MASKED, rows of slots that are not
    inside are 0."""
    h = tl.arange(0, WIDTH)
    at = rows_ptr + row_of(slot, HEAD_DIM, BLOCK_SIZE, ROW)[:, None] + h[None, :]
    if MASKED:
        x = tl.load(at, mask=inside[:, None] & (h < HEAD_DIM)[None, :], other=0)
    elif WIDTH > HEAD_DIM:
        x = tl.load(at, mask=(h < HEAD_DIM)[None, :], other=0)
    else:
        x = tl.load(at)
    if FORMAT == 1:
        x = x.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == 2:
        x = x.to(tl.float8e4nv, bitcast=True)
    return x.to(DOT)


@triton.jit
def load_scales(
    k_scales_ptr,
    v_scales_ptr,
    block,
    key,
    lowest,
    end,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
):
    """Load the int8 scales of consecutive keys and of their values; 0 for keys outside of [lowest,
    end)."""
    inside = (key >= lowest) & (key < end)
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    at = scale_of(slot, HEAD_DIM, BLOCK_SIZE, ROW)
    if BLOCK_SIZE % 4 == 0:
        # The first key is a multiple of 16, so four keys have 16 bytes of one block.
        at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    k_scale = tl.load(k_scales_ptr + at, mask=inside, other=0.0)
    return k_scale, tl.load(v_scales_ptr + at, mask=inside, other=0.0)


@triton.jit
def as_float16(q, factor):
    """Return rows as float16, and the factors of their scores, [rows, 1]. Rows are scaled by powers
    of two, so that float16 has the range for any bfloat16 numbers. It rounds only numbers of less
    than 2^-30 of a row's largest."""
    exponent = exponents_of(q)
    return with_exponent_14(q, exponent), factor_of(exponent) * factor


@triton.jit
def exponents_of(q):
    """Return the exponent of each row's largest number, [rows, 1]."""
    exponent = tl.max(q.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
    return tl.maximum(exponent, 15)[:, None]  # smaller numbers become 0


@triton.jit
def with_exponent_14(q, exponent):
    """Return rows as float16, whose largest number gets the exponent 14 of float16's 15."""
    scaled = q.to(tl.float32) * ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return scaled.to(tl.float16)


@triton.jit
def factor_of(exponent):
    """Return what a row with the exponent 14 must be multiplied by, [rows, 1]."""
    return ((exponent - 14) << 23).to(tl.float32, bitcast=True)


def _config(heads: int, size: int, kv_format: str, has_values: bool = True) -> Config:
    stored, row = ("*bf16", size) if kv_format == "auto" else ("*u8", size)
    row += 4 if kv_format == "int8" else 0
    signature = {
        "k_ptr": "*bf16",
        "v_ptr": "*bf16",
        "to_k_ptr": stored,
        "to_v_ptr": stored,
        "slots_ptr": "*i64",
        "k_stride": "i32",
        "v_stride": "i32",
        "head_stride": "i64",
        "k_inverse": "fp32",
        "v_inverse": "fp32",
    }
    constants = {
        "NUM_HEADS": heads,
        "HEADS": next_power_of_2(heads),
        "HALF": size // 2,
        "WIDTH": next_power_of_2(size // 2),
        "BLOCK_SIZE": 16,
        "ROW": row,
        "FORMAT": FORMATS[kv_format],
        "HAS_VALUES": has_values,
    }
    warps = _num_warps(next_power_of_2(heads) * next_power_of_2(size))
    divisible = ("k_stride", "v_stride", "head_stride")
    return Config(_write_kernel, signature, constants, num_warps=warps, divisible=divisible)


CONFIGS = [
    _config(8, 128, "auto"),
    _config(8, 128, "int8"),
    _config(8, 128, "fp8"),
    _config(32, 96, "auto"),
    _config(1, 576, "auto", has_values=False),
    _config(1, 576, "int8", has_values=False),
    _config(1, 576, "fp8", has_values=False),
]
