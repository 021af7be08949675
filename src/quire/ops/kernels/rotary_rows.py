"""Compute the factors by which positions rotate queries and keys, for a whole step in one launch.

Everything is in float64 except the results. This file computes sines and cosines itself: the
compiler's library keeps numbers in local memory for angles beyond 10^5, which positions reach.

Bound by memory: 16 E bytes per token are written. Expected on an H200, at 4.3 TB/s: the time of a
launch for a few tokens. 8192 tokens with heads of 128 take 2 us, and their 20 million instructions
in float64 about as long.
Shape legend: T tokens, E frequencies (half of a head), H = 2 E, A axes of positions.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2

TILE = 128  # angles in a program, one for each thread
WARP = 32

_QUARTERS_PER_RADIAN = tl.constexpr(0.6366197723675814)
# A quarter of a turn, pi / 2, in two parts. The first has so few bits that its product with an
# integer below 2^20 is exact.
_QUARTER = tl.constexpr(1.5707963267341256)
_QUARTER_REST = tl.constexpr(6.077100506506192e-11)
_TERMS = tl.constexpr(8)  # of each series after its first; the next is 10^-17 at pi / 4


@triton.jit
def _cos_sin(angle):
    """Return cosine and sine of float64 angles. The nearest quarter of a turn is subtracted, and
    series take the rest, at most pi / 4."""
    quarters = tl.floor(angle * _QUARTERS_PER_RADIAN + 0.5)
    left = angle - quarters * _QUARTER - quarters * _QUARTER_REST
    square = left * left
    cos, sin = tl.full(left.shape, 1.0, tl.float64), tl.full(left.shape, 1.0, tl.float64)
    for i in tl.static_range(_TERMS, 0, -1):
        cos = 1.0 - cos * (square * (1.0 / ((2 * i - 1) * (2 * i))))
        sin = 1.0 - sin * (square * (1.0 / ((2 * i) * (2 * i + 1))))
    sin *= left
    quarter = quarters.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    turned_cos, turned_sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    is_left, is_lower = (quarter == 1) | (quarter == 2), quarter >= 2
    return tl.where(is_left, -turned_cos, turned_cos), tl.where(is_lower, -turned_sin, turned_sin)


@kernel(do_not_specialize=["num_tokens", "axis_stride"])
def _rotary_rows_kernel(
    positions_ptr,
    frequencies_ptr,
    out_ptr,
    num_tokens,
    num_frequencies,
    axis_stride,  # between the positions of two axes
    SCALE: tl.constexpr,  # Triton would round an argument to float32
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    AXES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, WIDTH)
    is_token, is_frequency = token < num_tokens, at < num_frequencies
    position = tl.load(positions_ptr + token, mask=is_token, other=0).to(tl.float64)
    frequency = tl.load(frequencies_ptr + at, mask=is_frequency, other=0.0)[None, :]
    angle = position[:, None] * frequency
    for axis in tl.static_range(1, AXES):  # only one axis has a frequency other than 0
        positions_at = positions_ptr + axis * axis_stride + token
        position = tl.load(positions_at, mask=is_token, other=0).to(tl.float64)
        of_axis = frequencies_ptr + axis * num_frequencies + at
        own = tl.load(of_axis, mask=is_frequency, other=0.0)[None, :]
        angle += position[:, None] * own
        frequency += own
    cos, sin = _cos_sin(angle)
    # Elements that are not rotated have sine 0, and cosine 1 whatever the scale.
    cos = tl.where(frequency == 0.0, cos, cos * SCALE).to(tl.float32)
    sin = (sin * SCALE).to(tl.float32)
    inside = is_token[:, None] & is_frequency[None, :]
    out = out_ptr + token[:, None] * (4 * num_frequencies) + at[None, :]
    tl.store(out, cos, mask=inside)
    tl.store(out + num_frequencies, cos, mask=inside)
    tl.store(out + 2 * num_frequencies, -sin, mask=inside)
    tl.store(out + 3 * num_frequencies, sin, mask=inside)


def rotary_rows(
    positions_T: torch.Tensor, frequencies_E: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute `quire.ops.rotary.rotary_rows` in float32, [T, 1, 2 H], of integer positions [T] or
    [A, T] and float64 frequencies [E] or [A, E]."""
    assert not positions_T.is_floating_point()
    assert frequencies_E.dtype == torch.float64 and frequencies_E.is_contiguous()
    positions_T = positions_T.contiguous()
    num_tokens, num_frequencies = positions_T.shape[-1], frequencies_E.shape[-1]
    num_axes = frequencies_E.shape[0] if frequencies_E.dim() == 2 else 1
    assert positions_T.dim() == 1 or len(positions_T) == num_axes, "positions have these axes"
    out = torch.empty(
        num_tokens, 1, 4 * num_frequencies, dtype=torch.float32, device=positions_T.device
    )
    width = next_power_of_2(num_frequencies)
    tokens = _tokens(width)
    if out.numel():
        _rotary_rows_kernel[(triton.cdiv(num_tokens, tokens),)](
            positions_T,
            frequencies_E,
            out,
            num_tokens,
            num_frequencies,
            num_tokens if positions_T.dim() == 2 else 0,
            SCALE=float(scale),
            TOKENS=tokens,
            WIDTH=width,
            AXES=num_axes,
            num_warps=_num_warps(width),
        )
    return out


def _tokens(width: int) -> int:
    return max(1, TILE // width)


def _num_warps(width: int) -> int:
    return min(8, max(TILE, width) // WARP)


CONFIGS = [
    Config(
        _rotary_rows_kernel,
        {
            "positions_ptr": f"*{positions}",
            "frequencies_ptr": "*fp64",
            "out_ptr": "*fp32",
            "num_tokens": "i32",
            "num_frequencies": "i32",
            "axis_stride": "i32",
        },
        {"SCALE": scale, "TOKENS": _tokens(width), "WIDTH": width, "AXES": axes},
        num_warps=_num_warps(width),
    )
    for positions, scale, width, axes in (
        ("i64", 1.0, 64, 1),
        ("i32", 1.0, 64, 1),
        ("i64", 1.37, 32, 1),
        ("i64", 1.0, 128, 1),
        ("i64", 1.0, 64, 3),
    )
]
