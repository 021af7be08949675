"""The second launch of sampling where rows may have filters: one program per row, without a sort.

A token's key is its logit's bits as an integer in the logits' order. Halving a range of keys ends
at the exact cutoff: the smallest key that passes top-k, min-p and top-p. Of the tokens with that
key the lowest ids pass. The tokens that pass are the same as in `quire.ops.sampling.choice`, with
one exception. Masses are summed in float32, so a token may fall on the other side of top-p. This
happens if the mass before it is within some 1e-7 of the goal, and concerns one of tens of thousands
of tokens that pass.

The groups' largest logits show which groups of 128 tokens can have tokens that pass. These are at
most k groups for top-k, and the groups above the floor for min-p. For top-p they are as many groups
as hold the goal by their largest tokens alone. If at most MAX_HELD groups are left, they are
loaded into registers once, and all else happens there. Otherwise each halving reads the row again,
from the L2 cache.

Expected on an H200, not measured: 15 to 25 us for rows whose groups fit into registers, 132 rows at
a time. The reductions of some 50 halvings are the limit. A flat row of 151,936 logits takes 12
(bfloat16, top-p alone) to 50 passes of 8 us, bound by the arithmetic of one multiprocessor.
"""

import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.kernels.sampling.philox import rough_gumbel, uniform_of_counters
from quire.ops.kernels.sampling.sampling_scan import (
    CHUNK,
    COLUMNS,
    DIVISIBLE,
    GROUP,
    GROUPS,
    best_of_chunks,
    best_of_tile,
    has_filter,
    load_peaks,
    score_margin,
)

MAX_HELD = 64
NUM_WARPS = 16
_PASS_GROUPS = tl.constexpr(16)  # groups that a pass over the row reads at once

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_NO_COUNT = tl.constexpr(0x7FFFFFFF)
_MINUS_INFINITY = tl.constexpr(float("-inf"))
_INFINITY = tl.constexpr(float("inf"))
_KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)


@triton.jit
def _key_of(x, UNUSED_BITS: tl.constexpr):
    """Return the int32 keys of float32 numbers, in the same order; both zeros have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def _value_of(key, UNUSED_BITS: tl.constexpr):
    """Return the float32 of a key. Of a negative key the unused bits were ones before they were
    shifted out."""
    ordered = (key << UNUSED_BITS).to(tl.int32)
    ordered = tl.where(ordered < 0, ordered | ((1 << UNUSED_BITS) - 1), ordered)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _floor_key(peak, temperature, min_p, UNUSED_BITS: tl.constexpr):
    """Return the smallest key that passes min-p, by float64's comparison logit / T >= peak / T +
    log(p)."""
    lowest = (_KEY_OF_MINUS_INFINITY >> UNUSED_BITS) + 1
    exact_temperature = temperature.to(tl.float64)
    floor = peak.to(tl.float64) / exact_temperature + tl.log(min_p.to(tl.float64))
    near = _key_of((floor * exact_temperature).to(tl.float32), 0).to(tl.int64)
    keys = near + tl.arange(0, 16) - 8
    values = _value_of(keys.to(tl.int32), 0)
    passes = (values.to(tl.float64) / exact_temperature >= floor) & (keys <= 0x7F800000)
    key = tl.min(tl.where(passes, keys, 0x7F800000), axis=0)
    above = (key + ((1 << UNUSED_BITS) - 1)) >> UNUSED_BITS
    key = tl.where(key > 0, above, key >> UNUSED_BITS)
    return tl.where(min_p > 0, tl.maximum(key, lowest), lowest)


@triton.jit
def _count_loaded(keys, weights, key):
    """Count the tokens in registers with at least this key, and sum their mass."""
    passes = keys >= key.to(tl.int32)
    mass = tl.sum(tl.where(passes, weights, 0.0))
    return tl.sum(passes.to(tl.int32)), mass.to(tl.float64)


@triton.jit
def _count(keys, weights, key, logits_ptr, vocab_size, fits, peak, temperature,
           GROUP: tl.constexpr, UNUSED_BITS: tl.constexpr):  # fmt: skip
    """Count the row's tokens with at least this key, and sum their mass."""
    count, mass = _count_loaded(keys, weights, key)
    if fits == 0:
        tile: tl.constexpr = _PASS_GROUPS * GROUP
        # Summed up at the end, so that no load waits for other threads.
        counts = tl.zeros((tile,), tl.int32)
        masses = tl.zeros((tile,), tl.float32)
        for first in tl.range(0, vocab_size, tile, num_stages=4):
            ids = first + tl.arange(0, tile)
            x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=_MINUS_INFINITY)
            x = x.to(tl.float32)
            passes = _key_of(x, UNUSED_BITS) >= key.to(tl.int32)
            weights_here = tl.exp((x - peak) * (1.0 / temperature))
            masses += tl.where(passes, weights_here, 0.0)
            counts += passes.to(tl.int32)
        count = tl.sum(counts, axis=0)
        mass = tl.sum(masses, axis=0).to(tl.float64)
    return count, mass


@triton.jit
def _halve_groups(keys, weights, low, high, goal_count, goal_mass):
    """Return a key that enough groups reach, by count or by mass; `low` if too few do."""
    low_count, low_mass = _count_loaded(keys, weights, low)
    high_count = low_count * 0
    is_open = (low_count >= goal_count) | (low_mass >= goal_mass)
    while is_open & (high - low > 1) & (low_count - high_count > 1):
        middle = (low + high) >> 1
        count, mass = _count_loaded(keys, weights, middle)
        is_enough = (count >= goal_count) | (mass >= goal_mass)
        low = tl.where(is_enough, middle, low)
        low_count = tl.where(is_enough, count, low_count)
        high = tl.where(is_enough, high, middle)
        high_count = tl.where(is_enough, high_count, count)
    return low


@triton.jit
def _halve(
    keys, weights, low, low_count, low_mass, goal_count, goal_mass,
    logits_ptr, vocab_size, fits, peak, temperature,
    GROUP: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Find the largest key that enough tokens reach, by count or mass; else `low`, which all reach.

    Return the key, count and mass of the tokens that reach it, and count and mass of the tokens
    above it. Return also whether the cutoff is among the tokens with this key; if not, they all
    pass.
    """
    high = _key_of(peak, UNUSED_BITS).to(tl.int64) + 1
    high_count = low_count * 0
    high_mass = low_mass * 0
    is_open = (low_count >= goal_count) | (low_mass >= goal_mass)
    while is_open & (high - low > 1) & (low_count - high_count > 1):
        middle = (low + high) >> 1
        count, mass = _count(
            keys, weights, middle, logits_ptr, vocab_size, fits, peak, temperature,
            GROUP, UNUSED_BITS,
        )  # fmt: skip
        is_enough = (count >= goal_count) | (mass >= goal_mass)
        low = tl.where(is_enough, middle, low)
        low_count = tl.where(is_enough, count, low_count)
        low_mass = tl.where(is_enough, mass, low_mass)
        high = tl.where(is_enough, high, middle)
        high_count = tl.where(is_enough, high_count, count)
        high_mass = tl.where(is_enough, high_mass, mass)
    is_cut = is_open & (high - low == 1)
    return low, low_count, low_mass, high_count, high_mass, is_cut


@triton.jit
def _find_groups(
    held_ptr, maxima_ptr, masses_ptr, num_groups, peak, temperature, floor, goal_count, top_p,
    is_whole, NUM_GROUPS: tl.constexpr, MAX_HELD: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return a key that all passing tokens reach, the row's mass, and whether all groups that reach
    the key fit. The groups are written to held_ptr in the order of their ids."""
    group = tl.arange(0, NUM_GROUPS)
    is_group = group < num_groups
    maxima = tl.load(maxima_ptr + group, mask=is_group, other=_MINUS_INFINITY)
    masses = tl.load(masses_ptr + group, mask=is_group, other=0.0)
    keys = _key_of(maxima, UNUSED_BITS)
    weights = tl.exp((maxima - peak) * (1.0 / temperature))
    total = tl.sum((masses * weights).to(tl.float64), axis=0)
    # The groups' largest tokens alone must hold a little more than the nucleus' goal.
    goal = top_p.to(tl.float64) * total * (1 + 1e-5)
    goal_mass = tl.where(is_whole, goal, _INFINITY)
    top = _key_of(peak, UNUSED_BITS).to(tl.int64) + 1
    lowest_key = _halve_groups(keys, weights, floor, top, goal_count, goal_mass)
    reaches = keys >= lowest_key.to(tl.int32)
    place = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
    slot = tl.arange(0, MAX_HELD)
    tl.store(held_ptr + slot, slot * 0 + num_groups)
    tl.debug_barrier()
    tl.store(held_ptr + place, group, mask=reaches & (place < MAX_HELD))
    tl.debug_barrier()
    fits = tl.sum(reaches.to(tl.int32), axis=0) <= MAX_HELD
    return lowest_key, total, fits


@triton.jit
def _find_cutoff(
    keys, weights, lowest_key, total, goal_count, top_p, is_whole,
    logits_ptr, vocab_size, fits, peak, temperature,
    GROUP: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the smallest key that passes, and how many of the tokens with this key pass."""
    count, mass = _count(
        keys, weights, lowest_key, logits_ptr, vocab_size, fits, peak, temperature,
        GROUP, UNUSED_BITS,
    )  # fmt: skip
    none = tl.full((), _INFINITY, tl.float64)
    key, count, mass, above, mass_above, is_cut = _halve(
        keys, weights, lowest_key, count, mass, goal_count, none,
        logits_ptr, vocab_size, fits, peak, temperature, GROUP, UNUSED_BITS,
    )  # fmt: skip
    passing = tl.minimum(count, goal_count)
    at_key = tl.exp((_value_of(key, UNUSED_BITS) - peak) * (1.0 / temperature)).to(tl.float64)
    is_tied = is_cut & (passing < count)
    mass = tl.where(is_tied, mass_above + (passing - above) * at_key, mass)
    num_ties = tl.where(is_cut, passing - above, _NO_COUNT)
    if top_p < 1:
        goal = top_p.to(tl.float64) * tl.where(is_whole, total, mass)
        before = num_ties
        lowest = key
        key, count, mass, above, mass_above, is_cut = _halve(
            keys, weights, key, passing, mass, _NO_COUNT, goal,
            logits_ptr, vocab_size, fits, peak, temperature, GROUP, UNUSED_BITS,
        )  # fmt: skip
        # A tie is kept while the mass before it has not reached the goal.
        at_key = tl.exp((_value_of(key, UNUSED_BITS) - peak) * (1.0 / temperature)).to(tl.float64)
        ties = tl.ceil((goal - mass_above) / tl.maximum(at_key, 1e-300))
        ties = tl.minimum(tl.maximum(ties, 1.0), (count - above).to(tl.float64)).to(tl.int32)
        num_ties = tl.where(is_cut, ties, tl.where(key == lowest, before, _NO_COUNT))
    return key, num_ties


@triton.jit
def _passes_cutoff(keys, key, num_ties, seen):
    """Return which tokens of a tile [groups, tokens] pass, in the order of ids, and the new `seen`.
    It counts the tokens with this key so far."""
    is_tie = keys == key
    ties = is_tie.to(tl.int32)
    here = tl.sum(ties)
    passing = keys >= key
    if seen + here > num_ties:
        of_group = tl.sum(ties, axis=1)
        before = tl.cumsum(of_group, axis=0) - of_group
        place = seen + before[:, None] + tl.cumsum(ties, axis=1) - ties
        passing = passing & ((is_tie == 0) | (place < num_ties))
    return passing, seen + here


@triton.jit
def _draw(
    x, group, key, num_ties, seen, best, best_score, temperature, seed, sample, position,
    GROUP: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the best of a tile's passing tokens and of `best` before them, its score, and the new
    `seen`."""
    passing, seen = _passes_cutoff(_key_of(x, UNUSED_BITS), key.to(tl.int32), num_ties, seen)
    if tl.max(passing.to(tl.int32)) > 0:
        ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        counters = group[:, None] * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
        noise = uniform_of_counters(counters, seed, sample, position)
        score = x * (1.0 / temperature) + rough_gumbel(noise)
        score = tl.where(passing, score, _MINUS_INFINITY)
        top = tl.maximum(tl.max(score), best_score.to(tl.float32))
        in_doubt = passing & (score >= top - score_margin(top))
        best, best_score = best_of_tile(
            in_doubt, x, ids, temperature, seed, sample, position, best, best_score
        )
    return best, best_score, seen


@triton.jit
def _best_of_passing(
    x, group, key, num_ties, logits_ptr, vocab_size, fits, temperature, seed, sample, position,
    GROUP: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the row's token. The tile in registers is empty if the row's groups do not fit."""
    best = tl.full((), 0, tl.int32)
    best_score = tl.full((), _MINUS_INFINITY, tl.float64)
    seen = tl.full((), 0, tl.int32)
    best, best_score, seen = _draw(
        x, group, key, num_ties, seen, best, best_score, temperature, seed, sample, position,
        GROUP, UNUSED_BITS,
    )  # fmt: skip
    if fits == 0:
        for first in range(0, tl.cdiv(vocab_size, GROUP), _PASS_GROUPS):
            group_here = first + tl.arange(0, _PASS_GROUPS)
            ids = group_here[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            x_here = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=_MINUS_INFINITY)
            best, best_score, seen = _draw(
                x_here.to(tl.float32), group_here, key, num_ties, seen, best, best_score,
                temperature, seed, sample, position, GROUP, UNUSED_BITS,
            )  # fmt: skip
    return best


@triton.jit
def cutoff_of_row(
    logits_ptr, held_ptr, maxima_ptr, masses_ptr, vocab_size, num_groups, peak,
    temperature, top_k, top_p, min_p,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_HELD: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    """Return the row's cutoff, as `_find_cutoff`, the logits and groups in registers, and whether
    all groups fit there."""
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    goal_count = tl.where(has_top_k, top_k, _NO_COUNT).to(tl.int32)
    is_whole = (has_top_k == 0) & (min_p <= 0)
    floor = _floor_key(peak, temperature, min_p, UNUSED_BITS)
    lowest_key, total, fits = _find_groups(
        held_ptr, maxima_ptr, masses_ptr, num_groups, peak, temperature, floor, goal_count,
        top_p, is_whole, NUM_GROUPS, MAX_HELD, UNUSED_BITS,
    )  # fmt: skip
    group = tl.load(held_ptr + tl.arange(0, MAX_HELD))
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + ids, mask=(ids < vocab_size) & fits, other=_MINUS_INFINITY)
    x = x.to(tl.float32)
    keys = _key_of(x, UNUSED_BITS)
    weights = tl.exp((x - peak) * (1.0 / temperature))
    key, num_ties = _find_cutoff(
        keys, weights, lowest_key, total, goal_count, top_p, is_whole,
        logits_ptr, vocab_size, fits, peak, temperature, GROUP, UNUSED_BITS,
    )  # fmt: skip
    return key, num_ties, x, group, fits


@triton.jit
def _best_of_filtered(
    logits_ptr, held_ptr, maxima_ptr, masses_ptr, vocab_size, num_groups, peak,
    temperature, top_k, top_p, min_p, seed, sample, position,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, MAX_HELD: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    key, num_ties, x, group, fits = cutoff_of_row(
        logits_ptr, held_ptr, maxima_ptr, masses_ptr, vocab_size, num_groups, peak,
        temperature, top_k, top_p, min_p, NUM_GROUPS, GROUP, MAX_HELD, UNUSED_BITS,
    )  # fmt: skip
    return _best_of_passing(
        x, group, key, num_ties, logits_ptr, vocab_size, fits, temperature,
        seed, sample, position, GROUP, UNUSED_BITS,
    )  # fmt: skip


@kernel()
def settle_filtered(
    ids_ptr, is_valid_ptr,
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, sample_ptr, position_ptr, best_ptr, peak_ptr, maxima_ptr, masses_ptr, held_ptr,
    vocab_size, logits_stride, num_chunks, num_groups,
    HAS_ROWS: tl.constexpr, CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr,
    MAX_HELD: tl.constexpr, UNUSED_BITS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = n
    if HAS_ROWS:
        row = tl.load(rows_ptr + n).to(tl.int64)
    logits_ptr += n * logits_stride
    chunk = tl.arange(0, CHUNKS)
    peaks, peak, is_valid = load_peaks(peak_ptr + n * num_chunks, chunk, num_chunks)
    best = tl.full((), 0, tl.int32)
    if is_valid:
        temperature = tl.load(temperature_ptr + row)
        seed = tl.load(seed_ptr + row)
        sample = tl.load(sample_ptr + row)
        position = tl.load(position_ptr + n)
        if (temperature > 0) & has_filter(row, vocab_size, top_k_ptr, top_p_ptr, min_p_ptr):
            best = _best_of_filtered(
                logits_ptr, held_ptr + n * MAX_HELD,
                maxima_ptr + n * num_groups, masses_ptr + n * num_groups, vocab_size, num_groups,
                peak, temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row),
                tl.load(min_p_ptr + row), seed, sample, position,
                NUM_GROUPS, GROUP, MAX_HELD, UNUSED_BITS,
            )  # fmt: skip
        else:
            best = best_of_chunks(
                logits_ptr, best_ptr + n * num_chunks, peaks, peak, chunk, num_chunks,
                temperature, seed, sample, position,
            )  # fmt: skip
    tl.store(is_valid_ptr + n, is_valid)
    tl.store(ids_ptr + n, best.to(tl.int64))


_SIGNATURE = COLUMNS | {
    "ids_ptr": "*i64",
    "is_valid_ptr": "*i1",
    "held_ptr": "*i32",
    "num_chunks": "i32",
    "num_groups": "i32",
}

CONFIGS = [
    Config(
        settle_filtered,
        {"logits_ptr": kind} | _SIGNATURE,
        {
            "HAS_ROWS": True,
            "CHUNKS": next_power_of_2(-(-vocab_size // CHUNK)),
            "NUM_GROUPS": next_power_of_2(-(-vocab_size // CHUNK)) * GROUPS,
            "GROUP": GROUP,
            "MAX_HELD": MAX_HELD,
            "UNUSED_BITS": unused_bits,
        },
        num_warps=NUM_WARPS,
        divisible=DIVISIBLE,
    )
    for kind, unused_bits in (("*bf16", 16), ("*fp32", 0))
    for vocab_size in (32_000, 262_144)
]
