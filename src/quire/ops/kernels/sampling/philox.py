"""Philox noise on the device, with the bits of `quire.ops.sampling.philox`; and Gumbel noise from
it.

Four neighbouring token ids share one counter, so a tile of noise needs a quarter as many counters
as tokens. Kernels that need noise call the functions of this file. Its own kernels only write noise
out: some 15 instructions per token, 5 of them wide products. So arithmetic and writing take about
as long. Expected on an H200, not measured: 40 us for 256 rows of 151,936.

Shape legend: R rows, K chosen token ids of a row, V vocabulary, C counters.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import INTERPRETED, Config, kernel
from quire.ops.sampling.philox import DOMAIN_SAMPLING

_INTERPRETED = tl.constexpr(INTERPRETED)
_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_WEYL_0 = tl.constexpr(0x9E3779B9)
_WEYL_1 = tl.constexpr(0xBB67AE85)
_MASK = tl.constexpr(0xFFFFFFFF)
_DOMAIN = tl.constexpr(DOMAIN_SAMPLING)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_STEP = tl.constexpr(2.0**-32)
_LN_2 = tl.constexpr(0.6931471805599453)

_BLOCK = 1024


@triton.jit
def _multiply(multiplier: tl.constexpr, word):
    """Return high and low 32 bits of the product; one instruction on a GPU."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), (product & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """Compute Philox4x32-10 of uint32 tensors that broadcast together. Scalars stay scalars while
    they can."""
    for _ in tl.static_range(10):
        a_high, a_low = _multiply(_MULTIPLIER_0, c0)
        b_high, b_low = _multiply(_MULTIPLIER_1, c2)
        c0 = b_high ^ c1 ^ k0
        c2 = a_high ^ c3 ^ k1
        c1 = b_low
        c3 = a_low
        k0 = (k0.to(tl.uint64) + _WEYL_0).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + _WEYL_1).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def to_unit(words):
    """Convert 32 random bits to float32 in (0, 1), as `quire.ops.sampling.philox.to_unit`."""
    return tl.minimum((words.to(tl.float32) + 0.5) * _STEP, _BELOW_ONE)


@triton.jit
def _words(counters, seed, sample_index, position):
    zeros = counters.to(tl.uint32) * 0
    return philox_words(
        counters.to(tl.uint32),
        zeros + (position & _MASK).to(tl.uint32),
        zeros + (sample_index & _MASK).to(tl.uint32),
        zeros + _DOMAIN,
        (seed & _MASK).to(tl.uint32),
        ((seed >> 32) & _MASK).to(tl.uint32),
    )


@triton.jit
def uniform_of_counters(counters, seed, sample_index, position):
    """Return the noise of token ids 4 c to 4 c + 3 for counters [..., C]: float32 [..., 4 C]."""
    w0, w1, w2, w3 = _words(counters, seed, sample_index, position)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return to_unit(words)


@triton.jit
def uniform_of_ids(ids, seed, sample_index, position):
    """Return the noise of any token ids, one counter each: float32 of their shape."""
    w0, w1, w2, w3 = _words(ids >> 2, seed, sample_index, position)
    word = ids & 3
    low = tl.where(word == 0, w0, w1)
    high = tl.where(word == 2, w2, w3)
    return to_unit(tl.where(word < 2, low, high))


@triton.jit
def gumbel(uniform):
    """Convert uniform noise to Gumbel noise in float64, within 4e-15 of
    `quire.ops.sampling.choice.gumbel`.

    log(1 - u) loses the digits of a small u. The number that 1 - u really subtracted restores them.
    """
    u = uniform.to(tl.float64)
    rest = 1.0 - u
    return -tl.log(-tl.log(rest) * (u / (1.0 - rest)))


@triton.jit
def _rough_log2(x):
    """Return the hardware's log2; Triton's own takes ten times as many instructions."""
    if _INTERPRETED:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def rough_gumbel(uniform):
    """Convert uniform noise to Gumbel noise in float32, within 2e-5, to find the tokens that need
    an exact score.

    The hardware's logarithm has an absolute error of 2^-22 near 1, so small u take a series.
    """
    u = uniform
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 0.0625, series, _rough_log2(1.0 - u) * -_LN_2)
    return _rough_log2(exponential) * -_LN_2


@kernel()
def _uniform_kernel(out_ptr, seed_ptr, sample_ptr, position_ptr, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCK // 4)
    noise = uniform_of_counters(
        first + tl.arange(0, BLOCK // 4),
        tl.load(seed_ptr + row),
        tl.load(sample_ptr + row),
        tl.load(position_ptr + row),
    )
    ids = first * 4 + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * vocab_size + ids, noise, mask=ids < vocab_size)


@kernel()
def _uniform_at_kernel(
    out_ptr, ids_ptr, seed_ptr, sample_ptr, position_ptr, num_ids, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_ids
    noise = uniform_of_ids(
        tl.load(ids_ptr + row * num_ids + at, mask=inside, other=0),
        tl.load(seed_ptr + row),
        tl.load(sample_ptr + row),
        tl.load(position_ptr + row),
    )
    tl.store(out_ptr + row * num_ids + at, noise, mask=inside)


def uniform(
    seeds_R: torch.Tensor, sample_index_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Compute `quire.ops.sampling.philox.uniform`: float32 [R, V]."""
    streams = [stream.contiguous() for stream in (seeds_R, sample_index_R, positions_R)]
    out_RV = torch.empty(len(seeds_R), vocab_size, device=seeds_R.device)
    if out_RV.numel() > 0:
        grid = (len(seeds_R), triton.cdiv(vocab_size, _BLOCK))
        _uniform_kernel[grid](out_RV, *streams, vocab_size, BLOCK=_BLOCK)
    return out_RV


def uniform_at(
    seeds_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    token_ids_RK: torch.Tensor,
) -> torch.Tensor:
    """Compute `quire.ops.sampling.philox.uniform_at`: float32 [R, K]."""
    streams = [stream.contiguous() for stream in (seeds_R, sample_index_R, positions_R)]
    out_RK = torch.empty(token_ids_RK.shape, device=seeds_R.device)
    if out_RK.numel() > 0:
        num_ids = token_ids_RK.shape[-1]
        grid = (len(seeds_R), triton.cdiv(num_ids, _BLOCK))
        _uniform_at_kernel[grid](out_RK, token_ids_RK.contiguous(), *streams, num_ids, BLOCK=_BLOCK)
    return out_RK


_STREAM = {"seed_ptr": "*i64", "sample_ptr": "*i64", "position_ptr": "*i64"}

CONFIGS = [
    Config(_uniform_kernel, {"out_ptr": "*fp32", "vocab_size": "i32"} | _STREAM, {"BLOCK": _BLOCK}),
    Config(
        _uniform_at_kernel,
        {"out_ptr": "*fp32", "ids_ptr": "*i64", "num_ids": "i32"} | _STREAM,
        {"BLOCK": _BLOCK},
    ),
]
