"""Gather a step's inputs from the rows' state on a GPU, and advance that state at the step's end.

Each is one launch. Tensors and grids have the sizes of the largest step. The actual sizes are in
device memory, where `row_deltas.receive` put them. So the host waits for nothing, and both launches
can be captured in a CUDA graph. A step is

    receive  ->  gather_step  ->  forward pass, sampling  ->  advance

Expected on an H200: 3 to 6 us each, the time of a launch and of three or four dependent loads.
Bytes do not count: tables of 256 rows with 2560 blocks are 2.6 MB, 1.2 us.

Shape legend: R rows, M tokens a row can hold, S maximum number of scheduled rows and of sampling
rows, T maximum number of tokens of a step, G cache groups, L blocks of the longest context, Q
result slots, C columns of the rows' sampling parameters.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs, StepInputs

BLOCK = 512  # tokens, or table entries, that a program handles at a time
MAX_CHUNKS = 8  # maximum number of programs of a row
ADVANCED = 128  # rows of a program, one for each thread
MIN_WIDTH = 32  # minimum number of rows that kernels are compiled for

# Number of words before an inbox's lists, and the indices of the words in use.
HEADER = 8
NUM_ROWS, NUM_SAMPLES, RESULT_SLOT, TICKET = 0, 1, 2, 3


@dataclass(frozen=True)
class Inbox:
    """Rows that a step serves, on the device, as words of int32.

        [HEADER words | S rows | S numbers of tokens | S pairs, 2 words each]

    A pair is a sampling row and the index of the scheduled row whose logits it uses. That is its
    own, or its parent's if this step forks it. The header holds the numbers of valid rows and
    pairs, the result slot, and the step's ticket for its mail. No row occurs twice among the rows.
    """

    words: torch.Tensor
    max_rows: int

    @classmethod
    def empty(cls, max_rows: int, device: torch.device) -> "Inbox":
        """Make the inbox of a step without rows."""
        size = inbox_words(max_rows)
        return cls(torch.zeros(size, dtype=torch.int32, device=device), max_rows)

    def rows(self, num: int) -> torch.Tensor:
        """Return a view of the first `num` row slots, int32; any number in slots without rows."""
        return self.words[HEADER : HEADER + num]


def inbox_words(max_rows: int) -> int:
    """Return the size of an inbox in words."""
    return HEADER + 4 * max_rows


@dataclass(frozen=True)
class Mail:
    """Tokens of the last steps in pinned memory, where the host reads them without a copy. int32
    [Q, W]; a result slot is

        [S tokens | a flag for each program of `advance`]

    A program writes its tokens, then the step's ticket into its flag. The flag's release has the
    scope of the system, so a host that sees the ticket sees the tokens.
    """

    words_QW: torch.Tensor
    max_rows: int

    @staticmethod
    def width(max_rows: int) -> int:
        """Return W, a multiple of a cache line's words."""
        return 32 * triton.cdiv(max_rows + num_flags(max_rows), 32)


def num_flags(num_samples: int) -> int:
    """Return the number of flags to wait for until this many tokens are there, at least 1."""
    return max(1, -(-num_samples // ADVANCED))  # triton.cdiv takes microseconds


@dataclass(frozen=True)
class StepBuffers:
    """Memory for the inputs of one step, at the same addresses for all steps of a CUDA graph."""

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    query_starts_S1: torch.Tensor  # int32
    context_lens_S: torch.Tensor  # int32
    slots_GT: torch.Tensor  # int64
    block_tables_GSL: torch.Tensor  # int32
    samples_4S: torch.Tensor  # int64

    @classmethod
    def empty(
        cls, max_tokens: int, max_rows: int, num_groups: int, longest: int, device: torch.device
    ) -> "StepBuffers":
        """Allocate buffers without values. longest: blocks of the longest context, the width of the
        tables."""

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            samples_4S=make(torch.int64, 4, max_rows),
            ids_T=make(torch.int64, max_tokens),
            positions_T=make(torch.int64, max_tokens),
            query_starts_S1=make(torch.int32, max_rows + 1),
            context_lens_S=make(torch.int32, max_rows),
            slots_GT=make(torch.int64, num_groups, max_tokens),
            block_tables_GSL=make(torch.int32, num_groups, max_rows, longest),
        )

    @property
    def inputs(self) -> StepInputs:
        """Views of the whole buffers, padding included."""
        return StepInputs(
            self.ids_T,
            self.positions_T,
            self.query_starts_S1,
            self.context_lens_S,
            tuple(self.slots_GT.unbind()),
            tuple(self.block_tables_GSL.unbind()),
        )

    def first_samples(self, num: int) -> SampleInputs:
        """Return views of the inputs of the first `num` sampling rows."""
        return SampleInputs(*self.samples_4S[:, :num].unbind())


@triton.jit
def _gather_sample(
    n, at, counts, computed_ptr, prompt_lens_ptr, inbox_ptr, samples_ptr, inbox_rows, max_rows,
    HEADER: tl.constexpr,
):  # fmt: skip
    """Write the inputs of sampling row n: row, index of its logits' token, length, prompt
    length."""
    rows_ptr = inbox_ptr + HEADER
    pair_ptr = rows_ptr + 2 * inbox_rows + 2 * n
    is_sample = n < tl.load(inbox_ptr + 1)
    sampling = tl.load(pair_ptr, mask=is_sample, other=0).to(tl.int64)
    source = tl.load(pair_ptr + 1, mask=is_sample, other=0)
    logits_end = tl.sum(tl.where(at <= source, counts, 0), axis=0)
    its_row = tl.load(rows_ptr + source, mask=is_sample, other=0).to(tl.int64)
    length = tl.load(computed_ptr + its_row, mask=is_sample, other=0)
    length += tl.load(rows_ptr + inbox_rows + source, mask=is_sample, other=0)
    prompt_len = tl.load(prompt_lens_ptr + sampling, mask=is_sample, other=0)
    tl.store(samples_ptr + n, sampling)
    tl.store(samples_ptr + max_rows + n, tl.where(is_sample, logits_end - 1, 0).to(tl.int64))
    tl.store(samples_ptr + 2 * max_rows + n, length)
    tl.store(samples_ptr + 3 * max_rows + n, prompt_len)


@kernel(do_not_specialize=["max_tokens", "max_rows", "longest"])
def _gather_kernel(
    tokens_ptr,
    computed_ptr,
    tables_ptr,
    prompt_lens_ptr,
    inbox_ptr,
    ids_ptr,
    positions_ptr,
    starts_ptr,
    contexts_ptr,
    slots_ptr,
    step_tables_ptr,
    samples_ptr,
    token_stride,
    table_group,  # entries from one group's tables to the next
    table_stride,
    inbox_rows,
    max_tokens,
    max_rows,
    longest,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program (s, c): chunk c of scheduled row s. The row after the last one is the padding.
    s = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    count = tl.load(inbox_ptr)
    rows_ptr = inbox_ptr + HEADER
    num_tokens_ptr = rows_ptr + inbox_rows
    at = tl.arange(0, ROWS)
    counts = tl.load(num_tokens_ptr + at, mask=at < count, other=0)
    start = tl.sum(tl.where(at < s, counts, 0), axis=0)
    is_row = s < count
    row = tl.load(rows_ptr + s, mask=is_row, other=0).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + s, mask=is_row, other=0)
    computed = tl.load(computed_ptr + row, mask=is_row, other=0).to(tl.int32)
    context = computed + num_tokens
    if first == 0:
        tl.store(starts_ptr + s, start)
        tl.store(contexts_ptr + s, context, mask=s < max_rows)
        if s < max_rows:
            _gather_sample(
                s, at, counts, computed_ptr, prompt_lens_ptr, inbox_ptr, samples_ptr, inbox_rows,
                max_rows, HEADER,
            )  # fmt: skip
    row_tables_ptr = tables_ptr + row * table_stride
    for i in range(first, num_tokens, step):
        index = i + tl.arange(0, BLOCK)
        # Never write outside the buffers: more tokens than max_tokens are the caller's bug.
        inside = (index < num_tokens) & (start + index < max_tokens)
        position = computed + index
        ids = tl.load(tokens_ptr + row * token_stride + position, mask=inside, other=0)
        tl.store(ids_ptr + start + index, ids.to(tl.int64), mask=inside)
        tl.store(positions_ptr + start + index, position.to(tl.int64), mask=inside)
        for g in tl.static_range(NUM_GROUPS):
            entry = row_tables_ptr + g * table_group + position // BLOCK_SIZE
            block = tl.load(entry, mask=inside, other=0).to(tl.int64)
            slot = tl.where(block < 0, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
            tl.store(slots_ptr + g * max_tokens + start + index, slot, mask=inside)
    if s < max_rows:
        num_blocks = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
        for i in range(first, longest, step):
            index = i + tl.arange(0, BLOCK)
            for g in tl.static_range(NUM_GROUPS):
                entry = row_tables_ptr + g * table_group + index
                block = tl.load(entry, mask=(index < num_blocks) & (index < longest), other=-1)
                out = step_tables_ptr + (g * max_rows + s).to(tl.int64) * longest + index
                tl.store(out, block, mask=index < longest)
    else:
        for i in range(start + first, max_tokens, step):
            index = i + tl.arange(0, BLOCK)
            nothing = tl.zeros([BLOCK], dtype=tl.int64)
            tl.store(ids_ptr + index, nothing, mask=index < max_tokens)
            tl.store(positions_ptr + index, nothing, mask=index < max_tokens)
            for g in tl.static_range(NUM_GROUPS):
                tl.store(slots_ptr + g * max_tokens + index, nothing - 1, mask=index < max_tokens)


def gather_step(state: RowTensors, inbox: Inbox, out: StepBuffers) -> StepInputs:
    """Write a step's inputs, as `quire.ops.rows.step_inputs.gather_step` does, and its sampling
    rows (`StepBuffers.first_samples`) to buffers that may have room for more.

    Tokens after the last have id 0, position 0 and slot -1. Rows after the last have no tokens and
    an empty context. Table entries after a row's context are -1. Sampling rows after the last are
    row 0, with index 0 and length 0. The buffers may be smaller than the inbox if the step fits
    into them.
    """
    max_rows, longest = out.block_tables_GSL.shape[1:]
    max_tokens = len(out.ids_T)
    assert max_rows <= inbox.max_rows, "the inbox is too small"
    assert longest <= state.tables_GRL.shape[2], "the rows' tables are shorter than the step's"
    num_chunks = min(MAX_CHUNKS, triton.cdiv(max(max_tokens, longest, 1), BLOCK))
    _gather_kernel[(max_rows + 1, num_chunks)](
        state.tokens_RM,
        state.computed_R,
        state.tables_GRL,
        state.wide_CR[state.prompt_column],
        inbox.words,
        out.ids_T,
        out.positions_T,
        out.query_starts_S1,
        out.context_lens_S,
        out.slots_GT,
        out.block_tables_GSL,
        out.samples_4S,
        state.tokens_RM.stride(0),
        state.tables_GRL.stride(0),
        state.tables_GRL.stride(1),
        inbox.max_rows,
        max_tokens,
        max_rows,
        longest,
        NUM_GROUPS=len(out.slots_GT),
        BLOCK_SIZE=state.block_size,
        HEADER=HEADER,
        ROWS=max(MIN_WIDTH, next_power_of_2(max_rows)),
        BLOCK=BLOCK,
    )
    return out.inputs


@kernel(do_not_specialize=["max_rows"])
def _advance_kernel(
    tokens_ptr,
    computed_ptr,
    inbox_ptr,
    contexts_ptr,
    ids_ptr,
    is_valid_ptr,
    results_ptr,
    token_stride,
    max_len,
    inbox_rows,
    max_rows,
    mail_ptr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    MAIL_WORDS: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = (at < tl.load(inbox_ptr)) & (at < max_rows)
    row = tl.load(inbox_ptr + HEADER + at, mask=is_row, other=0).to(tl.int64)
    context = tl.load(contexts_ptr + at, mask=is_row, other=0)
    tl.store(computed_ptr + row, context.to(tl.int64), mask=is_row)

    is_sample = (at < tl.load(inbox_ptr + 1)) & (at < max_rows)
    pair_ptr = inbox_ptr + HEADER + 2 * inbox_rows + 2 * at
    row = tl.load(pair_ptr, mask=is_sample, other=0).to(tl.int64)
    source = tl.load(pair_ptr + 1, mask=is_sample, other=0)
    length = tl.load(contexts_ptr + source, mask=is_sample, other=0)
    token = tl.load(ids_ptr + at, mask=is_sample, other=0).to(tl.int32)
    is_valid = tl.load(is_valid_ptr + at, mask=is_sample, other=0) != 0
    token = tl.where(is_valid, token, 0)
    tl.store(tokens_ptr + row * token_stride + length, token, mask=is_sample & (length < max_len))
    # A row that was forked in this step has computed as many tokens as its source. For other rows
    # this stores the same value as above.
    tl.store(computed_ptr + row, length.to(tl.int64), mask=is_sample)
    slot = tl.load(inbox_ptr + 2).to(tl.int64)
    token = tl.where(is_valid, token, -1)
    tl.store(results_ptr + slot * inbox_rows + at, token, mask=is_sample)
    if MAIL_WORDS > 0:
        mail_ptr += slot * MAIL_WORDS
        tl.store(mail_ptr + at, token, mask=is_sample)
        tl.debug_barrier()  # the tokens of all threads come before the flag
        flag_ptr = mail_ptr + inbox_rows + tl.program_id(0)
        tl.atomic_xchg(flag_ptr, tl.load(inbox_ptr + 3), sem="release", scope="sys")


def advance(
    state: RowTensors,
    inbox: Inbox,
    context_lens_S: torch.Tensor,
    token_ids_N: torch.Tensor,
    is_valid_N: torch.Tensor,
    results_QS: torch.Tensor,
    mail: Mail | None = None,
) -> None:
    """Store the sampled tokens after their rows' last token and move the counters, as
    `row_state.advance` does. Write the tokens to the inbox's result slot too. A second call changes
    nothing.

    context_lens_S: of gather_step, for this step. token_ids_N: int64 or int32, at least as many as
    sampling rows. is_valid_N: bool [N], whether there was a token to choose. A row without one gets
    token 0, and -1 as its result. results_QS: int32, contiguous, as wide as the inbox has rows.
    mail: also gets the tokens.
    """
    max_rows = len(context_lens_S)
    assert len(token_ids_N) == len(is_valid_N) <= max_rows, "one token for each sampling row"
    assert results_QS.shape[1] == inbox.max_rows and results_QS.is_contiguous()
    _advance_kernel[(triton.cdiv(max_rows, ADVANCED),)](
        state.tokens_RM,
        state.computed_R,
        inbox.words,
        context_lens_S,
        token_ids_N,
        is_valid_N,
        results_QS,
        state.tokens_RM.stride(0),
        state.tokens_RM.shape[1],
        inbox.max_rows,
        max_rows,
        results_QS if mail is None else mail.words_QW,
        HEADER=HEADER,
        BLOCK=ADVANCED,
        MAIL_WORDS=0 if mail is None else mail.words_QW.shape[1],
    )


_STATE = {"tokens_ptr": "*i32", "computed_ptr": "*i64", "tables_ptr": "*i32"}
_STRIDES = {"token_stride": "i32", "table_group": "i32", "table_stride": "i32"}
_SCHEDULED = {"prompt_lens_ptr": "*i64", "inbox_ptr": "*i32", "inbox_rows": "i32"}
_OUT = {"ids_ptr": "*i64", "positions_ptr": "*i64", "starts_ptr": "*i32", "contexts_ptr": "*i32"}
_OUT_GROUPS = {"slots_ptr": "*i64", "step_tables_ptr": "*i32", "samples_ptr": "*i64"}
_SIZES = {"max_tokens": "i32", "max_rows": "i32", "longest": "i32"}

CONFIGS = [
    *(
        Config(
            _gather_kernel,
            _STATE | _STRIDES | _SCHEDULED | _OUT | _OUT_GROUPS | _SIZES,
            {
                "NUM_GROUPS": num_groups,
                "BLOCK_SIZE": 16,
                "HEADER": HEADER,
                "ROWS": rows,
                "BLOCK": BLOCK,
            },
        )
        for num_groups, rows in ((1, MIN_WIDTH), (1, 256), (2, 1024))
    ),
    *(
        Config(
            _advance_kernel,
            {
                "tokens_ptr": "*i32",
                "computed_ptr": "*i64",
                "inbox_ptr": "*i32",
                "contexts_ptr": "*i32",
                "ids_ptr": "*i64",
                "is_valid_ptr": "*i1",
                "results_ptr": "*i32",
                "token_stride": "i32",
                "max_len": "i32",
                "inbox_rows": "i32",
                "max_rows": "i32",
                "mail_ptr": "*i32",
            },
            {"HEADER": HEADER, "BLOCK": ADVANCED, "MAIL_WORDS": mail_words},
        )
        for mail_words in (0, Mail.width(256))
    ),
]
