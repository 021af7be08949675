"""Choose tokens on the device: temperature, min-p, top-k, top-p and Gumbel-max, without a sort.

There are two launches, whatever the rows request. `sampling_scan.scan` reads the logits once, split
over the vocabulary. Then one program per row takes the best of its chunks. For a row with filters
it finds the cutoff and draws among the tokens that pass (`sampling_filtered.settle_filtered`). A
row's token depends neither on other rows nor on how the vocabulary was split. The two modules state
their expected times; the second launch without filters takes a launch's time.

Shape legend: N rows, R rows of the parameters' columns, V vocabulary, C chunks, G groups.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.kernels.sampling.sampling_filtered import MAX_HELD, NUM_WARPS, settle_filtered
from quire.ops.kernels.sampling.sampling_scan import (
    ALL,
    CHUNK,
    COLUMNS,
    EVEN_PART,
    GROUP,
    GROUPS,
    ODD_PART,
    best_of_chunks,
    exact_score,
    load_peaks,
    scan,
)

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_MINUS_INFINITY = tl.constexpr(float("-inf"))

# Low bits of a float32 that are the same for all numbers of the dtype.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of each row: [R] each, contiguous. Temperature 0 is the greedy choice.

    temperature, top_p and min_p: float32. top_k (0 or less: off), seeds and sample_index: int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    sample_index: torch.Tensor


@kernel()
def _settle(
    ids_ptr, is_valid_ptr, logits_ptr, rows_ptr, temperature_ptr, seed_ptr, sample_ptr,
    position_ptr, best_ptr, peak_ptr, logits_stride, num_chunks,
    HAS_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = n
    if HAS_ROWS:
        row = tl.load(rows_ptr + n).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    peaks, peak, is_valid = load_peaks(peak_ptr + n * num_chunks, chunk, num_chunks)
    best = best_of_chunks(
        logits_ptr + n * logits_stride, best_ptr + n * num_chunks, peaks, peak, chunk, num_chunks,
        tl.load(temperature_ptr + row), tl.load(seed_ptr + row), tl.load(sample_ptr + row),
        tl.load(position_ptr + n),
    )  # fmt: skip
    tl.store(is_valid_ptr + n, is_valid)
    tl.store(ids_ptr + n, tl.where(is_valid, best, 0).to(tl.int64))


@kernel()
def _settle_part(
    pairs_ptr, logits_ptr, rows_ptr, temperature_ptr, seed_ptr, sample_ptr, position_ptr,
    best_ptr, peak_ptr, first, logits_stride, num_chunks,
    HAS_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    row = n
    if HAS_ROWS:
        row = tl.load(rows_ptr + n).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < num_chunks
    peaks, peak, is_valid = load_peaks(peak_ptr + n * num_chunks, chunk, num_chunks)
    ids = tl.load(best_ptr + n * num_chunks + chunk, mask=is_chunk, other=0)
    scores = peaks.to(tl.float64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        x = tl.load(logits_ptr + n * logits_stride + ids, mask=is_chunk, other=_MINUS_INFINITY)
        scores = exact_score(
            x.to(tl.float32), ids + first, temperature, tl.load(seed_ptr + row),
            tl.load(sample_ptr + row), tl.load(position_ptr + n),
        )  # fmt: skip
    score = tl.max(scores, axis=0)
    best = tl.min(tl.where(scores == score, ids, _NO_TOKEN), axis=0)
    nothing = tl.where(peak > _MINUS_INFINITY, float("inf"), _MINUS_INFINITY)
    tl.store(pairs_ptr + 2 * n, tl.where(is_valid, score, nothing.to(tl.float64)))
    tl.store(pairs_ptr + 2 * n + 1, tl.where(is_valid, best + first, 0).to(tl.float64))


def _arguments(
    logits_NV: torch.Tensor,
    columns: SamplingColumns,
    positions_N: torch.Tensor,
    rows_N: torch.Tensor | None,
    best_NC: torch.Tensor,
    peak_NC: torch.Tensor,
) -> dict[str, Any]:
    """Return the arguments that both launches take."""
    return {
        "logits_ptr": logits_NV,
        "rows_ptr": positions_N if rows_N is None else rows_N,
        "temperature_ptr": columns.temperature,
        "seed_ptr": columns.seeds,
        "sample_ptr": columns.sample_index,
        "position_ptr": positions_N,
        "best_ptr": best_NC,
        "peak_ptr": peak_NC,
        "logits_stride": logits_NV.stride(0),
        "HAS_ROWS": rows_N is not None,
    }


def sample(
    logits_NV: torch.Tensor,
    columns: SamplingColumns,
    positions_N: torch.Tensor,
    rows_N: torch.Tensor | None = None,
    *,
    has_filters: bool,
    max_groups: int = MAX_HELD,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token per row, int64 [N], and whether the row had one to choose, bool [N].

    logits_NV: float32, float16 or bfloat16. positions_N: int64. rows_N: integers, each row's index
    in the columns (row n if absent). Both are contiguous. has_filters: whether any row may have
    top_k, top_p or min_p; otherwise they are ignored. A row with NaN, or with an infinite largest
    logit, is not valid and gets token 0. max_groups: groups of 128 tokens that a filtered row holds
    in registers, a power of 2.
    """
    num_rows, vocab_size = logits_NV.shape
    device = logits_NV.device
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_valid_N = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return ids_N, is_valid_N
    if logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.contiguous()
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best_NC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    peak_NC = torch.empty(num_rows, num_chunks, device=device)
    maxima_NG = masses_NG = peak_NC
    if has_filters:
        shape = 2, num_rows, num_chunks * GROUPS
        maxima_NG, masses_NG = torch.empty(shape, device=device).unbind()
    arguments = _arguments(logits_NV, columns, positions_N, rows_N, best_NC, peak_NC)
    filtered = {
        "top_k_ptr": columns.top_k,
        "top_p_ptr": columns.top_p,
        "min_p_ptr": columns.min_p,
        "maxima_ptr": maxima_NG,
        "masses_ptr": masses_NG,
        "vocab_size": vocab_size,
        "GROUP": GROUP,
    }
    scan[(num_rows, num_chunks)](
        **arguments,
        **filtered,
        first=0,
        HAS_FILTERS=has_filters,
        PART=ALL,
        GROUPS=GROUPS,
        num_warps=4,
    )
    arguments |= {
        "ids_ptr": ids_N,
        "is_valid_ptr": is_valid_N,
        "num_chunks": num_chunks,
        "CHUNKS": next_power_of_2(num_chunks),
    }
    if not has_filters:
        _settle[(num_rows,)](**arguments, num_warps=1)
        return ids_N, is_valid_N
    settle_filtered[(num_rows,)](
        **arguments,
        **filtered,
        held_ptr=torch.empty(num_rows, max_groups, dtype=torch.int32, device=device),
        num_groups=num_chunks * GROUPS,
        NUM_GROUPS=next_power_of_2(num_chunks) * GROUPS,
        MAX_HELD=max_groups,
        UNUSED_BITS=_UNUSED_BITS[logits_NV.dtype],
        num_warps=NUM_WARPS,
    )
    return ids_N, is_valid_N


def best_of_part(
    logits_NV: torch.Tensor,
    columns: SamplingColumns,
    positions_N: torch.Tensor,
    rows_N: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Return the best token of a part of the vocabulary, for rows without filters: pairs of a score
    and a token id, float64 [N, 2].

    The part has the tokens from `first` on. The score is -inf if all its logits are -inf, and inf
    if it has NaN or an infinite logit.
    """
    num_rows, width = logits_NV.shape
    device = logits_NV.device
    pairs_N2 = torch.empty(num_rows, 2, dtype=torch.float64, device=device)
    if num_rows == 0:
        return pairs_N2
    if logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.contiguous()
    num_chunks = triton.cdiv(width, CHUNK)
    peak_NC = torch.empty(num_rows, num_chunks, device=device)
    best_NC = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    arguments = _arguments(logits_NV, columns, positions_N, rows_N, best_NC, peak_NC)
    arguments["first"] = first
    scan[(num_rows, num_chunks)](
        **arguments,
        top_k_ptr=columns.top_k,
        top_p_ptr=columns.top_p,
        min_p_ptr=columns.min_p,
        maxima_ptr=peak_NC,
        masses_ptr=peak_NC,
        vocab_size=width,
        HAS_FILTERS=False,
        PART=ODD_PART if first % 4 else EVEN_PART,
        GROUPS=GROUPS,
        GROUP=GROUP,
        num_warps=4,
    )
    _settle_part[(num_rows,)](
        pairs_ptr=pairs_N2,
        **arguments,
        num_chunks=num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=1,
    )
    return pairs_N2


_SIGNATURE = COLUMNS | {"ids_ptr": "*i64", "is_valid_ptr": "*i1", "num_chunks": "i32"}
_SIGNATURE |= {"pairs_ptr": "*fp64"}

CONFIGS = [
    Config(
        kernel,
        {"logits_ptr": kind}
        | {name: _SIGNATURE[name] for name in kernel.arg_names if name in _SIGNATURE},
        {"HAS_ROWS": True, "CHUNKS": chunks},
        num_warps=1,
    )
    for kernel in (_settle, _settle_part)
    for kind in ("*bf16", "*fp32")
    for chunks in (16, 128)
]
