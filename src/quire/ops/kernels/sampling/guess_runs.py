"""Guesses at what rows go on with: what followed the last time that their tokens ended like this.

A program for each row reads its tokens from the end on, a block of places at a time, and compares
as many tokens before each with the row's last ones as still are alike. It ends with the block in
which a run of the most tokens is found.

Expected on an H200, not measured: 5 us for a row that repeats what it said lately; some 30 us for
one of 32,768 tokens in which nothing is found, which is 32 blocks, each two loads that wait for
each other. Rows are beside each other.

Shape legend: G rows that guess.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, next_power_of_2
from quire.ops.rows.row_state import RowTensors
from quire.ops.sampling.device_guesses import Runs

BLOCK = 1024  # places at a time
LEAST_GUESSES = 8  # for fewer nothing else is compiled


@triton.jit(do_not_specialize=["fewest", "most", "searched"])
def _guess_kernel(
    tokens_ptr, computed_ptr, rows_ptr, nums_ptr, token_stride, fewest, most, searched,
    GUESSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0)
    row = tl.load(rows_ptr + g).to(tl.int64)
    num = tl.load(nums_ptr + g)
    row_ptr = tokens_ptr + row * token_stride
    length = tl.load(computed_ptr + row).to(tl.int32) + 1
    first = tl.maximum(length - searched, fewest)
    newest = length - 1  # the place behind a run, at most
    best_run = fewest - 1
    place = length
    while (newest >= first) & (best_run < most):
        ends = newest - tl.arange(0, BLOCK)
        is_alike = ends >= first
        run = tl.zeros([BLOCK], dtype=tl.int32)
        n = 0
        while (n < most) & (tl.max(is_alike.to(tl.int32), axis=0) > 0):
            own = tl.load(row_ptr + length - 1 - n, mask=n < length, other=0)
            is_alike = is_alike & (ends > n)
            found = tl.load(row_ptr + ends - 1 - n, mask=is_alike, other=0)
            is_alike = is_alike & (found == own)
            run += is_alike.to(tl.int32)
            n += 1
        longest = tl.max(run, axis=0)
        if longest > best_run:
            best_run = longest
            place = tl.max(tl.where(run == longest, ends, -1), axis=0)
        newest -= BLOCK
    at = tl.arange(0, GUESSES)
    behind = tl.maximum(length - place, 1)
    guesses = tl.load(row_ptr + place + at % behind, mask=(at < num) & (place < length), other=0)
    tl.store(row_ptr + length + at, guesses, mask=at < num)


def guess_runs(
    state: RowTensors, rows_G: torch.Tensor, nums_G: torch.Tensor, most_guesses: int, runs: Runs
) -> None:
    """Do as `quire.ops.sampling.device_guesses.guess_runs_reference`. rows, nums: int32 on the
    device; most_guesses: the most of these."""
    _guess_kernel[(len(rows_G),)](
        state.tokens_RM,
        state.computed_R,
        rows_G,
        nums_G,
        state.tokens_RM.stride(0),
        runs.fewest,
        runs.most,
        runs.searched,
        GUESSES=max(LEAST_GUESSES, next_power_of_2(most_guesses)),
        BLOCK=BLOCK,
    )


CONFIGS = [
    Config(
        _guess_kernel,
        {
            "tokens_ptr": "*i32",
            "computed_ptr": "*i64",
            "rows_ptr": "*i32",
            "nums_ptr": "*i32",
            "token_stride": "i32",
            "fewest": "i32",
            "most": "i32",
            "searched": "i32",
        },
        {"GUESSES": guesses, "BLOCK": BLOCK},
    )
    for guesses in (LEAST_GUESSES, 32)
]
