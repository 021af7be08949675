"""Compute log-probabilities of chosen and most probable tokens without sorting the vocabulary.

There are two launches. The first reads the logits once, split over the vocabulary. It stores the
largest logit and the sum of exp per group of 128 tokens. Per chunk it stores how many tokens rank
before the chosen one. The second has a program per row. The n largest tokens are in the n groups
with the largest logits. So it loads only those groups and takes the largest token n times.

Expected on an H200, not measured: the first launch is bound by reading, 18 us for 256 rows of
151,936 bfloat16 logits. The second takes n times 0.3 us, 10 us for 20 candidates.

Shape legend: R rows, V vocabulary, K candidates with the chosen token, G groups.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.sampling import logprobs as reference
from quire.ops.sampling.logprobs import TokenLogprobs

MAX_CANDIDATES = 32
_GROUP = 128
_GROUPS = 16  # groups of a chunk
_CHUNK = _GROUP * _GROUPS

_MINUS_INFINITY = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def _key(x, ids):
    """Return int64 keys that sort tokens: larger logits have larger keys, then lower ids; all are
    distinct."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@kernel()
def _measure(
    logits_ptr, chosen_ptr, maxima_ptr, masses_ptr, before_ptr, vocab_size, logits_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    logits_ptr += row * logits_stride
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=_MINUS_INFINITY).to(tl.float32)
    chosen = tl.load(chosen_ptr + row)
    mark = tl.load(logits_ptr + chosen).to(tl.float32)
    # Tokens beyond the vocabulary have the highest ids, so they come before no other token.
    is_before = (x > mark) | ((x == mark) & (ids < chosen))
    tl.store(before_ptr + row * tl.num_programs(1) + chunk, tl.sum(is_before.to(tl.int32)))
    maxima = tl.max(x, axis=1)
    finite = tl.where(maxima > _MINUS_INFINITY, maxima, 0.0)
    at = row * tl.num_programs(1) * GROUPS + group
    tl.store(maxima_ptr + at, maxima)
    tl.store(masses_ptr + at, tl.sum(tl.exp(x - finite[:, None]), axis=1))


@triton.jit
def _take_largest(
    logits_ptr, maxima, group, vocab_size, ids_ptr, num_candidates,
    PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write a row's largest tokens to ids_ptr, in descending order."""
    keys = tl.where(maxima == maxima, _key(maxima, group), _NO_KEY)
    slot = tl.arange(0, PLACES)
    no_group = 0x7FFFFFFF // GROUP  # beyond every vocabulary
    found = slot * 0 + no_group
    for i in range(num_candidates):
        largest = tl.max(keys, axis=0)
        here = tl.minimum(_id_of(largest), no_group).to(tl.int32)
        found = tl.where(slot == i, here, found)
        keys = tl.where(keys == largest, _NO_KEY, keys)
    tokens = found[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = tokens < vocab_size
    x = tl.load(logits_ptr + tokens, mask=inside, other=_MINUS_INFINITY).to(tl.float32)
    tokens_keys = tl.where(inside, _key(x, tokens), _NO_KEY)
    for i in range(num_candidates):
        largest = tl.max(tokens_keys)
        # A row with NaN may run out of tokens: then any id will do.
        tl.store(ids_ptr + i, tl.minimum(_id_of(largest), vocab_size - 1))
        tokens_keys = tl.where(tokens_keys == largest, _NO_KEY, tokens_keys)


@kernel()
def _gather_logprobs(
    ids_ptr, logprobs_ptr, ranks_ptr, logits_ptr, chosen_ptr, maxima_ptr, masses_ptr, before_ptr,
    vocab_size, logits_stride, num_chunks, num_groups, num_candidates,
    CHUNKS: tl.constexpr, NUM_GROUPS: tl.constexpr, PLACES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    group = tl.arange(0, NUM_GROUPS)
    at = row * num_groups + group
    maxima = tl.load(maxima_ptr + at, mask=group < num_groups, other=_MINUS_INFINITY)
    masses = tl.load(masses_ptr + at, mask=group < num_groups, other=0.0)
    chunk = tl.arange(0, CHUNKS)
    before = tl.load(before_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    tl.store(ranks_ptr + row, 1 + tl.sum(before, axis=0).to(tl.int64))

    peak = tl.max(maxima, axis=0)
    mass = tl.sum(masses * tl.exp(maxima - peak), axis=0)
    log_total = peak.to(tl.float64) + tl.log(mass.to(tl.float64))
    ids_ptr += row * (num_candidates + 1)
    chosen = tl.load(chosen_ptr + row)
    tl.store(ids_ptr, chosen)
    if num_candidates > 0:
        _take_largest(
            logits_ptr, maxima, group, vocab_size, ids_ptr + 1, num_candidates, PLACES, GROUP
        )
    tl.debug_barrier()  # other threads' writes are read next
    slot = tl.arange(0, 2 * PLACES)
    is_requested = slot <= num_candidates
    ids = tl.load(ids_ptr + slot, mask=is_requested, other=0)
    x = tl.load(logits_ptr + ids, mask=is_requested, other=0.0).to(tl.float64)
    out = logprobs_ptr + row * (num_candidates + 1) + slot
    tl.store(out, (x - log_total).to(tl.float32), mask=is_requested)


def token_logprobs(
    logits_RV: torch.Tensor, chosen_R: torch.Tensor, num_candidates: int
) -> TokenLogprobs:
    """Compute `quire.ops.sampling.logprobs.token_logprobs` of float32, float16 or bfloat16 logits
    [R, V].

    The reference computes more than MAX_CANDIDATES candidates. Results of rows with NaN are
    meaningless.
    """
    num_rows, vocab_size = logits_RV.shape
    num_candidates = min(num_candidates, vocab_size)
    if num_candidates > MAX_CANDIDATES:
        return reference.token_logprobs_reference(logits_RV.float(), chosen_R, num_candidates)
    device = logits_RV.device
    ids_RK = torch.empty(num_rows, 1 + num_candidates, dtype=torch.int64, device=device)
    logprobs_RK = torch.empty(num_rows, 1 + num_candidates, device=device)
    ranks_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return TokenLogprobs(ids_RK, logprobs_RK, ranks_R)
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    num_groups = num_chunks * _GROUPS
    maxima_RG, masses_RG = torch.empty(2, num_rows, num_groups, device=device).unbind()
    before_RC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    arguments = {
        "logits_ptr": logits_RV,
        "chosen_ptr": chosen_R.contiguous(),
        "maxima_ptr": maxima_RG,
        "masses_ptr": masses_RG,
        "before_ptr": before_RC,
        "vocab_size": vocab_size,
        "logits_stride": logits_RV.stride(0),
        "GROUP": _GROUP,
    }
    _measure[(num_rows, num_chunks)](**arguments, GROUPS=_GROUPS, num_warps=4)
    _gather_logprobs[(num_rows,)](
        **arguments,
        ids_ptr=ids_RK,
        logprobs_ptr=logprobs_RK,
        ranks_ptr=ranks_R,
        num_chunks=num_chunks,
        num_groups=num_groups,
        num_candidates=num_candidates,
        CHUNKS=next_power_of_2(num_chunks),
        NUM_GROUPS=next_power_of_2(num_groups),
        PLACES=next_power_of_2(num_candidates),
        num_warps=4,
    )
    return TokenLogprobs(ids_RK, logprobs_RK, ranks_R)


_INPUTS = {
    "chosen_ptr": "*i64",
    "maxima_ptr": "*fp32",
    "masses_ptr": "*fp32",
    "before_ptr": "*i32",
    "vocab_size": "i32",
    "logits_stride": "i64",
}
_OUTPUTS = {
    "ids_ptr": "*i64",
    "logprobs_ptr": "*fp32",
    "ranks_ptr": "*i64",
    "num_chunks": "i32",
    "num_groups": "i32",
    "num_candidates": "i32",
}

CONFIGS = [
    config
    for kind in ("*bf16", "*fp32")
    for config in (
        Config(
            _measure,
            {"logits_ptr": kind} | _INPUTS,
            {"GROUPS": _GROUPS, "GROUP": _GROUP},
            divisible=("vocab_size", "logits_stride"),
        ),
        *(
            Config(
                _gather_logprobs,
                {"logits_ptr": kind} | _INPUTS | _OUTPUTS,
                {"CHUNKS": 128, "NUM_GROUPS": 2048, "PLACES": places, "GROUP": _GROUP},
                divisible=("vocab_size", "logits_stride"),
            )
            for places in (1, 32)
        ),
    )
]
