"""The first launch of sampling: one read of the logits, split over the vocabulary.

For each chunk of 2,048 tokens it stores the best token, by logit / temperature + noise, or by the
logit in a greedy row. It also stores the largest logit, or infinity if the chunk has NaN. For rows
with filters it stores the largest logit and the mass of each group of 128 tokens, instead of the
best token.

Scores are computed in float32 first. The few tokens that this leaves in doubt are scored again in
float64. So the choice is the same as in `quire.ops.sampling.choice`, however the vocabulary is
split.

Expected on an H200, not measured: greedy rows are bound by reading (18 us for 256 rows of 151,936
bfloat16 logits). Random rows are bound by some 60 instructions per token, a third of them Philox,
which makes 80 to 100 us for the same rows. One row is 75 programs: the time of a launch.

Shape legend: N rows, V vocabulary, C chunks, G groups.
"""

import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel
from quire.ops.kernels.sampling.philox import (
    gumbel,
    rough_gumbel,
    uniform_of_counters,
    uniform_of_ids,
)

# The tokens of the columns: all; or a part from `first` on. In an even part `first` is a multiple
# of 4, so that four columns share a counter. An odd part begins anywhere.
ALL, EVEN_PART, ODD_PART = 0, 1, 2
GROUP = 128
GROUPS = 16  # groups of a chunk
CHUNK = GROUPS * GROUP

_ALL = tl.constexpr(ALL)
_ODD_PART = tl.constexpr(ODD_PART)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def score_margin(score):
    """Return the distance beyond which rounded scores are in the order of the exact ones."""
    return 1e-4 + 2e-6 * tl.abs(score)


@triton.jit
def exact_score(logit, ids, temperature, seed, sample, position):
    """Return a token's score in float64, as in `quire.ops.sampling.choice`."""
    noise = gumbel(uniform_of_ids(ids, seed, sample, position))
    return logit.to(tl.float64) / temperature.to(tl.float64) + noise


@triton.jit
def best_of_tile(in_doubt, x, ids, temperature, seed, sample, position, best, best_score):
    """Return the best of the tokens in doubt and of `best` before them, by exact scores, and its
    score.

    Of equal scores the lowest token id wins, and `best`, whose id is lower, before them all.
    """
    left = tl.sum(in_doubt.to(tl.int32))
    while left > 0:
        token = tl.min(tl.where(in_doubt, ids, _NO_TOKEN))
        logit = tl.max(tl.where(ids == token, x, _MINUS_INFINITY))
        score = exact_score(logit, token, temperature, seed, sample, position)
        is_better = score > best_score
        best = tl.where(is_better, token, best)
        best_score = tl.where(is_better, score, best_score)
        in_doubt = in_doubt & (ids != token)
        left -= 1
    return best, best_score


@triton.jit
def best_of_chunks(
    logits_ptr, best_ptr, peaks, peak, chunk, num_chunks, temperature, seed, sample, position
):
    """Return the best of the chunks' best tokens: by their logits, or by exact scores."""
    is_chunk = chunk < num_chunks
    ids = tl.load(best_ptr + chunk, mask=is_chunk, other=0)
    if temperature > 0:
        x = tl.load(logits_ptr + ids, mask=is_chunk, other=_MINUS_INFINITY).to(tl.float32)
        score = exact_score(x, ids, temperature, seed, sample, position)
        best = tl.min(tl.where(score == tl.max(score, axis=0), ids, _NO_TOKEN), axis=0)
    else:
        best = tl.min(tl.where(peaks == peak, ids, _NO_TOKEN), axis=0)
    return best


@triton.jit
def load_peaks(peak_ptr, chunk, num_chunks):
    """Return the largest logit of each chunk and of the row, and whether the row has a token to
    choose."""
    peaks = tl.load(peak_ptr + chunk, mask=chunk < num_chunks, other=_MINUS_INFINITY)
    peak = tl.max(peaks, axis=0)
    return peaks, peak, (peak > _MINUS_INFINITY) & (peak < float("inf"))


@triton.jit
def has_filter(row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr):
    top_k = tl.load(top_k_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    return has_top_k | (tl.load(top_p_ptr + row) < 1) | (tl.load(min_p_ptr + row) > 0)


@triton.jit
def _noise_of_chunk(
    ids, group, seed, sample, position, first, PART: tl.constexpr, GROUP: tl.constexpr
):
    if PART == _ODD_PART:
        noise = uniform_of_ids(ids, seed, sample, position)
    else:
        counters = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
        if PART != _ALL:
            counters += first // 4
        noise = uniform_of_counters(counters, seed, sample, position)
    return noise


@triton.jit
def _best_of_chunk(
    x, ids, group, peak, temperature, seed, sample, position, first, vocab_size,
    PART: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    if PART != _ALL:
        ids += first
    score = x
    if temperature > 0:
        noise = _noise_of_chunk(ids, group, seed, sample, position, first, PART, GROUP)
        score = x * (1.0 / temperature) + rough_gumbel(noise)
    top = tl.max(score)
    best = tl.min(tl.where(score == top, ids, _NO_TOKEN))
    if (temperature > 0) & (peak > _MINUS_INFINITY):
        in_doubt = score >= top - score_margin(top)
        if tl.sum(in_doubt.to(tl.int32)) > 1:
            nothing = tl.full((), _MINUS_INFINITY, tl.float64)
            best, _ = best_of_tile(
                in_doubt, x, ids, temperature, seed, sample, position, best, nothing
            )
    if PART != _ALL:
        best -= first
    return tl.minimum(best, vocab_size - 1)


@kernel()
def scan(
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, sample_ptr, position_ptr, best_ptr, peak_ptr, maxima_ptr, masses_ptr,
    first, vocab_size, logits_stride,
    HAS_ROWS: tl.constexpr, HAS_FILTERS: tl.constexpr, PART: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = n * tl.num_programs(1) + chunk
    row = n
    if HAS_ROWS:
        row = tl.load(rows_ptr + n).to(tl.int64)
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(
        logits_ptr + n * logits_stride + ids, mask=ids < vocab_size, other=_MINUS_INFINITY
    ).to(tl.float32)
    # Rows with NaN and rows with infinity both have no token to choose, and are treated equally.
    x = tl.where(x != x, float("inf"), x)
    maxima = tl.max(x, axis=1)
    peak = tl.max(maxima, axis=0)
    tl.store(peak_ptr + at, peak)

    temperature = tl.load(temperature_ptr + row)
    is_filtered = False
    if HAS_FILTERS:
        is_filtered = (temperature > 0) & has_filter(
            row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr
        )
    if is_filtered:
        finite = tl.where(maxima > _MINUS_INFINITY, maxima, 0.0)
        weights = tl.exp((x - finite[:, None]) * (1.0 / temperature))
        groups_at = n * tl.num_programs(1) * GROUPS + group
        tl.store(maxima_ptr + groups_at, maxima)
        tl.store(masses_ptr + groups_at, tl.sum(weights, axis=1))
    else:
        best = _best_of_chunk(
            x, ids, group, peak, temperature,
            tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + n),
            first, vocab_size, PART, GROUP,
        )  # fmt: skip
        tl.store(best_ptr + at, best)


COLUMNS = {
    "rows_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "top_k_ptr": "*i64",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "seed_ptr": "*i64",
    "sample_ptr": "*i64",
    "position_ptr": "*i64",
    "best_ptr": "*i32",
    "peak_ptr": "*fp32",
    "maxima_ptr": "*fp32",
    "masses_ptr": "*fp32",
    "first": "i32",
    "vocab_size": "i32",
    "logits_stride": "i64",
}

DIVISIBLE = ("vocab_size", "logits_stride")

CONFIGS = [
    Config(
        scan,
        {"logits_ptr": kind} | COLUMNS,
        {
            "HAS_ROWS": True,
            "HAS_FILTERS": has_filters,
            "PART": part,
            "GROUPS": GROUPS,
            "GROUP": GROUP,
        },
        divisible=DIVISIBLE,
    )
    for kind in ("*bf16", "*fp32")
    for has_filters, part in ((False, ALL), (True, ALL), (False, EVEN_PART), (False, ODD_PART))
]
