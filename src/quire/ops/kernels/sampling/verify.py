"""Verify draft tokens in a step whose sizes are fixed: where rows sample, and what counts.

A row samples at its own position, after its last known token, and after each of its draft tokens.
The own positions of all N row slots come first, then the drafts' positions, row by row:

    position   0 ........ N - 1 | N ............................. | ... P - 1
    samples    own, of each row | row 0: after draft 1, 2 ...; row 1: ... | padding

`draft_positions` makes the inputs of sampling from the inputs of the row slots. `accept_drafts`
compares the chosen tokens with the draft tokens and stores the last token that counts. As the last
launch of a step it also moves the counters. Both read the step's rows in the inbox, and the number
of each row's draft tokens in a column of the rows' state. So a CUDA graph can hold them.

Expected on an H200, not measured: 3 to 5 us each, the time of a launch and of some dependent loads.

Shape legend: R rows, N row slots, P positions, K maximum draft tokens of a row.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.kernels.step_inputs import HEADER, MIN_WIDTH, Inbox
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.device_drafts import NO_TOKEN

MIN_DRAFTS = 8  # minimum 1 + K that kernels are compiled for
BLOCK = 128  # positions of padding that are written at a time


@triton.jit
def _row_and_drafts(n, inbox_ptr, drafts_ptr, inbox_rows, HEADER: tl.constexpr, ROWS: tl.constexpr):
    """Return the sampling rows [ROWS], -1 for none. Also return the numbers of draft tokens of
    sampling row n and of all earlier rows."""
    at = tl.arange(0, ROWS)
    is_sample = at < tl.load(inbox_ptr + 1)
    rows = tl.load(inbox_ptr + HEADER + 2 * inbox_rows + 2 * at, mask=is_sample, other=-1)
    counts = tl.load(drafts_ptr + rows, mask=is_sample, other=0)
    own = tl.sum(tl.where(at == n, counts, 0), axis=0)
    return rows, own, tl.sum(tl.where(at < n, counts, 0), axis=0)


@kernel(do_not_specialize=["inbox_rows", "num_rows", "num_positions"])
def _positions_kernel(
    inbox_ptr, drafts_ptr, rows_ptr, last_ptr, lengths_ptr, prompts_ptr, out_ptr,
    inbox_rows, num_rows, num_positions,
    HEADER: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program n: positions of sampling row n. The program after the last one: the padding.
    n = tl.program_id(0)
    _, own, before = _row_and_drafts(n, inbox_ptr, drafts_ptr, inbox_rows, HEADER, ROWS)
    if n < num_rows:
        depth = tl.arange(0, DRAFTS)
        to = tl.where(depth == 0, n, num_rows + before + depth - 1)
        inside = (depth <= own) & (to < num_positions)
        nothing = tl.zeros([DRAFTS], tl.int64)
        tl.store(out_ptr + to, nothing + tl.load(rows_ptr + n), mask=inside)
        last = tl.load(last_ptr + n) - own + depth
        tl.store(out_ptr + num_positions + to, last, mask=inside)
        length = tl.load(lengths_ptr + n) - own + depth
        tl.store(out_ptr + 2 * num_positions + to, length, mask=inside)
        prompt = nothing + tl.load(prompts_ptr + n)
        tl.store(out_ptr + 3 * num_positions + to, prompt, mask=inside)
    else:
        for first in range(num_rows + before, num_positions, BLOCK):
            to = first + tl.arange(0, BLOCK)
            for i in tl.static_range(4):
                place = out_ptr + i * num_positions + to
                tl.store(place, tl.zeros([BLOCK], tl.int64), mask=to < num_positions)


def draft_positions(
    inbox: Inbox, drafts_R: torch.Tensor, samples: SampleInputs, num_positions: int, max_drafts: int
) -> SampleInputs:
    """Return the inputs of sampling at all positions, [P]. samples: inputs of the row slots, [N],
    whose lengths and tokens include the draft tokens. Positions of the padding are of row 0, with
    index 0 and length 0.

    drafts_R: int32, the number of draft tokens of each row.
    """
    num_rows, device = len(samples.rows), samples.rows.device
    out_4P = torch.empty(4, num_positions, dtype=torch.int64, device=device)
    _positions_kernel[(num_rows + 1,)](
        inbox.words,
        drafts_R,
        samples.rows,
        samples.last,
        samples.lengths,
        samples.prompt_lens,
        out_4P,
        inbox.max_rows,
        num_rows,
        num_positions,
        HEADER=HEADER,
        ROWS=max(MIN_WIDTH, next_power_of_2(num_rows)),
        DRAFTS=_width(max_drafts),
        BLOCK=BLOCK,
    )
    return SampleInputs(*out_4P.unbind())


@kernel(do_not_specialize=["max_len", "inbox_rows", "num_rows", "width"])
def _accept_kernel(
    tokens_ptr, computed_ptr, inbox_ptr, drafts_ptr, contexts_ptr, ids_ptr, is_valid_ptr,
    found_ptr, counts_ptr, token_stride, max_len, inbox_rows, num_rows, width,
    HEADER: tl.constexpr, NO_TOKEN: tl.constexpr, ROWS: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    sampling, own, before = _row_and_drafts(n, inbox_ptr, drafts_ptr, inbox_rows, HEADER, ROWS)
    # A scheduled row that samples nothing itself has computed its tokens.
    is_scheduled = n < tl.load(inbox_ptr)
    row = tl.load(inbox_ptr + HEADER + n, mask=is_scheduled, other=0)
    samples = tl.max((sampling == row).to(tl.int32), axis=0) > 0
    context = tl.load(contexts_ptr + n)
    tl.store(computed_ptr + row, context.to(tl.int64), mask=is_scheduled & (samples == 0))

    is_sample = n < tl.load(inbox_ptr + 1)
    pair_ptr = inbox_ptr + HEADER + 2 * inbox_rows + 2 * n
    row = tl.load(pair_ptr, mask=is_sample, other=0).to(tl.int64)
    source = tl.load(pair_ptr + 1, mask=is_sample, other=0)
    known = tl.load(contexts_ptr + source, mask=is_sample, other=0) - own
    depth = tl.arange(0, DRAFTS)
    at = tl.where(depth == 0, n, num_rows + before + depth - 1)
    is_own = is_sample & (depth <= own)
    is_valid = tl.load(is_valid_ptr + at, mask=is_own, other=0) != 0
    token = tl.load(ids_ptr + at, mask=is_own, other=0).to(tl.int32)
    token = tl.where(is_own & is_valid, token, NO_TOKEN)
    has_draft = is_sample & (depth < own)
    row_ptr = tokens_ptr + row * token_stride
    draft = tl.load(row_ptr + known + depth, mask=has_draft, other=NO_TOKEN)
    after = num_rows + before + depth  # position after that draft token
    is_valid_after = tl.load(is_valid_ptr + after, mask=has_draft, other=0) != 0
    is_right = has_draft & is_valid & (token == draft) & is_valid_after
    num_right = tl.min(tl.where(is_right, DRAFTS, depth), axis=0)
    tl.store(found_ptr + n * width + depth, token, mask=depth < width)
    tl.store(counts_ptr + n, 1 + num_right)
    last = tl.sum(tl.where(depth == num_right, token, 0), axis=0)
    length = known + num_right
    tl.store(row_ptr + length, tl.maximum(last, 0), mask=is_sample & (length < max_len))
    tl.store(computed_ptr + row, length.to(tl.int64), mask=is_sample)


def accept_drafts(
    state: RowTensors,
    inbox: Inbox,
    drafts_R: torch.Tensor,
    contexts_N: torch.Tensor,
    ids_P: torch.Tensor,
    is_valid_P: torch.Tensor,
    max_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each row slot, int32 [N, 1 + K], NO_TOKEN for none, and how many of them
    count, int32 [N], as `quire.ops.sampling.device_drafts.accept_drafts` does. Store the last token
    that counts, and move the counters.

    contexts_N: of gather_step, for this step. ids_P, is_valid_P: chosen tokens at the positions of
    `draft_positions`, int64, and whether there was one to choose, bool.
    """
    num_rows, device = len(contexts_N), state.device
    found_NK1 = torch.empty(num_rows, 1 + max_drafts, dtype=torch.int32, device=device)
    counts_N = torch.empty(num_rows, dtype=torch.int32, device=device)
    _accept_kernel[(num_rows,)](
        state.tokens_RM,
        state.computed_R,
        inbox.words,
        drafts_R,
        contexts_N,
        ids_P,
        is_valid_P,
        found_NK1,
        counts_N,
        state.tokens_RM.stride(0),
        state.tokens_RM.shape[1],
        inbox.max_rows,
        num_rows,
        1 + max_drafts,
        HEADER=HEADER,
        NO_TOKEN=NO_TOKEN,
        ROWS=max(MIN_WIDTH, next_power_of_2(num_rows)),
        DRAFTS=_width(max_drafts),
    )
    return found_NK1, counts_N


def _width(max_drafts: int) -> int:
    return max(MIN_DRAFTS, next_power_of_2(1 + max_drafts))


_INTEGERS = ("inbox_rows", "num_rows", "num_positions", "token_stride", "max_len", "width")
_POINTERS = dict.fromkeys(("inbox_ptr", "drafts_ptr", "tokens_ptr", "contexts_ptr"), "*i32")
_POINTERS |= {"found_ptr": "*i32", "counts_ptr": "*i32", "is_valid_ptr": "*i1"}


def _config(kernel: triton.JITFunction, rows: int, drafts: int) -> Config:
    shared = {"HEADER": HEADER, "ROWS": rows, "DRAFTS": drafts}
    own = {"BLOCK": BLOCK} if kernel is _positions_kernel else {"NO_TOKEN": NO_TOKEN}
    constants = shared | own
    signature = {
        name: "i32" if name in _INTEGERS else _POINTERS.get(name, "*i64")
        for name in kernel.arg_names
        if name not in constants
    }
    return Config(kernel, signature, constants)


CONFIGS = [
    _config(kernel, rows, drafts)
    for kernel in (_positions_kernel, _accept_kernel)
    for rows, drafts in ((MIN_WIDTH, MIN_DRAFTS), (256, MIN_DRAFTS), (MIN_WIDTH, 64))
]
