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
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.kernels.step_inputs import HEADER, Inbox
from quire.ops.rows.row_state import RowTensors
from quire.ops.sampling.device_drafts import Runs

BLOCK = 1024  # positions at a time
MIN_DRAFTS = 8  # minimum that kernels are compiled for


@kernel(do_not_specialize=["min_run", "max_run", "searched"])
def _draft_kernel(
    tokens_ptr, computed_ptr, rows_ptr, nums_ptr, inbox_ptr, token_stride, min_run, max_run,
    searched, BY_ROW: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # BY_ROW: the rows are the inbox's, and nums are indexed by row instead of g.
    g = tl.program_id(0)
    row = tl.load(rows_ptr + g).to(tl.int64)
    if BY_ROW:
        num = tl.load(nums_ptr + row, mask=g < tl.load(inbox_ptr), other=0)
    else:
        num = tl.load(nums_ptr + g)
    if num == 0:
        return
    row_ptr = tokens_ptr + row * token_stride
    length = tl.load(computed_ptr + row).to(tl.int32) + 1
    first = tl.maximum(length - searched, min_run)
    newest = length - 1  # the last position that may follow a run
    best_run = min_run - 1
    source = length
    while (newest >= first) & (best_run < max_run):
        ends = newest - tl.arange(0, BLOCK)
        is_equal = ends >= first
        run = tl.zeros([BLOCK], dtype=tl.int32)
        n = 0
        while (n < max_run) & (tl.max(is_equal.to(tl.int32), axis=0) > 0):
            own = tl.load(row_ptr + length - 1 - n, mask=n < length, other=0)
            is_equal = is_equal & (ends > n)
            found = tl.load(row_ptr + ends - 1 - n, mask=is_equal, other=0)
            is_equal = is_equal & (found == own)
            run += is_equal.to(tl.int32)
            n += 1
        longest = tl.max(run, axis=0)
        if longest > best_run:
            best_run = longest
            source = tl.max(tl.where(run == longest, ends, -1), axis=0)
        newest -= BLOCK
    at = tl.arange(0, DRAFTS)
    period = tl.maximum(length - source, 1)
    drafts = tl.load(row_ptr + source + at % period, mask=(at < num) & (source < length), other=0)
    tl.store(row_ptr + length + at, drafts, mask=at < num)


def draft_runs(
    state: RowTensors, rows_G: torch.Tensor, nums_G: torch.Tensor, max_drafts: int, runs: Runs
) -> None:
    """Write draft tokens, as `quire.ops.sampling.device_drafts.draft_runs_reference` does. rows_G,
    nums_G: int32 [G] on the device. max_drafts: the maximum of nums_G."""
    _launch(state, rows_G, nums_G, rows_G, len(rows_G), max_drafts, runs, by_row=False)


def draft_runs_of_step(
    state: RowTensors,
    inbox: Inbox,
    drafts_R: torch.Tensor,
    num_rows: int,
    max_drafts: int,
    runs: Runs,
) -> None:
    """Write draft tokens for the rows of the step in the inbox, at most num_rows. drafts_R: [R],
    int32, the number of draft tokens of each row of the engine, at most max_drafts."""
    rows_S, words = inbox.words[HEADER:], inbox.words
    _launch(state, rows_S, drafts_R, words, num_rows, max_drafts, runs, by_row=True)


def _launch(
    state: RowTensors,
    rows: torch.Tensor,
    nums: torch.Tensor,
    inbox: torch.Tensor,
    num_rows: int,
    max_drafts: int,
    runs: Runs,
    *,
    by_row: bool,
) -> None:
    _draft_kernel[(num_rows,)](
        state.tokens_RM,
        state.computed_R,
        rows,
        nums,
        inbox,
        state.tokens_RM.stride(0),
        runs.min_run,
        runs.max_run,
        runs.searched,
        BY_ROW=by_row,
        DRAFTS=max(MIN_DRAFTS, next_power_of_2(max_drafts)),
        BLOCK=BLOCK,
    )


CONFIGS = [
    Config(
        _draft_kernel,
        {
            "tokens_ptr": "*i32",
            "computed_ptr": "*i64",
            "rows_ptr": "*i32",
            "nums_ptr": "*i32",
            "inbox_ptr": "*i32",
            "token_stride": "i32",
            "min_run": "i32",
            "max_run": "i32",
            "searched": "i32",
        },
        {"BY_ROW": by_row, "DRAFTS": drafts, "BLOCK": BLOCK},
    )
    for drafts in (MIN_DRAFTS, 32)
    for by_row in (False, True)
]
