"""Propose draft tokens by prompt lookup: what followed the last time that a row's tokens ended the
same way.

A program for each row reads its tokens from the end on, a block of positions at a time. It compares
the tokens before each position with the row's last ones as long as they are equal. It ends with the
block in which a run of maximum length is found.

Expected on an H200, not measured: 5 us for a row that repeats recent text. A row of 32,768 tokens
without a match takes some 30 us: 32 blocks of two dependent loads each. Rows run in parallel.

Shape legend: G rows that get draft tokens.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, next_power_of_2
from quire.ops.rows.row_state import RowTensors
from quire.ops.sampling.device_guesses import Runs

BLOCK = 1024  # positions at a time
LEAST_GUESSES = 8  # minimum that kernels are compiled for


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
    newest = length - 1  # the last position that may follow a run
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
    """Write draft tokens, as `quire.ops.sampling.device_guesses.guess_runs_reference` does. rows_G,
    nums_G: int32 [G] on the device. most_guesses: the maximum of nums_G."""
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
