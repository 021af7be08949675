"""The rows' state on a GPU: deltas in, a step's inputs out, counters on. One launch for each.

Sizes of tensors and of grids are those of the largest step, and how much of it is there stands in
device memory, where a copy from pinned memory put it: the host waits for nothing, and all three
launches can be captured in a CUDA graph. A step is

    apply_deltas  ->  gather_step  ->  forward pass, sampling  ->  advance

Expected on an H200: 3 to 6 us each, the time of a launch and of three or four loads that wait for
each other. Bytes do not count: tables of 256 rows with 2560 blocks are 2.6 MB, 1.2 us.

Shape legend: R rows, M tokens a row can hold, S the most scheduled rows, T the most tokens of a
step, G cache groups, L blocks of the longest context, N the most sampling rows, W the most deltas.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, next_power_of_2
from quire.ops.step_inputs import StepInputs

BLOCK = 512  # tokens, or table entries, of a program at a time
MOST_CHUNKS = 8  # programs of a row
DELTAS = 128  # of a program at a time
LATER = 32  # with which they are compared at a time
DELTA_PROGRAMS = 32
ADVANCED = 128  # rows of a program, one for each thread

# In a delta's first column instead of a cache group.
COMPUTED = tl.constexpr(-1)
TOKEN = tl.constexpr(-2)


@dataclass(frozen=True)
class RowTensors:
    """The state of `quire.ops.step_inputs.RowState`, with the block tables of all cache groups in
    one tensor [G, R, L]: tokens_RM int32, computed_R int64, tables_GRL int32, all contiguous."""

    tokens_RM: torch.Tensor
    computed_R: torch.Tensor
    tables_GRL: torch.Tensor
    block_size: int

    def __post_init__(self) -> None:
        for values in (self.tokens_RM, self.computed_R, self.tables_GRL):
            assert values.is_contiguous(), f"needs contiguous rows, got {values.stride()}"


@dataclass(frozen=True)
class Scheduled:
    """What a step serves: rows_S and num_tokens_S, int32, of which the first count_1 (int32) are
    valid. No row stands there twice. All of it on the device, the columns contiguous."""

    rows_S: torch.Tensor
    num_tokens_S: torch.Tensor
    count_1: torch.Tensor


@dataclass(frozen=True)
class StepBuffers:
    """Memory for the inputs of one step, at the same addresses for all steps of a CUDA graph."""

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    query_starts_S1: torch.Tensor  # int32
    context_lens_S: torch.Tensor  # int32
    slots_GT: torch.Tensor  # int64
    block_tables_GSL: torch.Tensor  # int32

    @classmethod
    def empty(
        cls, max_tokens: int, max_rows: int, num_groups: int, longest: int, device: torch.device
    ) -> "StepBuffers":
        """Without values. longest: blocks of the longest context, the width of the tables."""

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
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


@triton.jit
def _gather_kernel(
    tokens_ptr,
    computed_ptr,
    tables_ptr,
    rows_ptr,
    num_tokens_ptr,
    count_ptr,
    ids_ptr,
    positions_ptr,
    starts_ptr,
    contexts_ptr,
    slots_ptr,
    step_tables_ptr,
    token_stride,
    table_group,  # entries from one group's tables to the next
    table_stride,
    max_tokens,
    max_rows,
    longest,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Program (s, c): chunk c of scheduled row s. The row behind the last one is the padding.
    s = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    count = tl.load(count_ptr)
    at = tl.arange(0, ROWS)
    start = tl.sum(tl.load(num_tokens_ptr + at, mask=(at < s) & (at < count), other=0), axis=0)
    is_row = s < count
    row = tl.load(rows_ptr + s, mask=is_row, other=0).to(tl.int64)
    num_tokens = tl.load(num_tokens_ptr + s, mask=is_row, other=0)
    computed = tl.load(computed_ptr + row, mask=is_row, other=0).to(tl.int32)
    context = computed + num_tokens
    if first == 0:
        tl.store(starts_ptr + s, start)
        tl.store(contexts_ptr + s, context, mask=s < max_rows)
    row_tables_ptr = tables_ptr + row * table_stride
    for i in range(first, num_tokens, step):
        index = i + tl.arange(0, BLOCK)
        # Tokens beyond the most would be the caller's bug; foreign memory is not written.
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


def gather_step(state: RowTensors, scheduled: Scheduled, out: StepBuffers) -> StepInputs:
    """As `quire.ops.step_inputs.gather_step`, of as many rows as there are, in buffers for more.

    Tokens behind the last have id 0, position 0 and slot -1; rows behind the last have no tokens
    and an empty context. Table entries behind a row's context are -1.
    """
    max_rows, longest = out.block_tables_GSL.shape[1:]
    max_tokens = len(out.ids_T)
    assert len(scheduled.rows_S) == len(scheduled.num_tokens_S) == max_rows, "buffers of one size"
    assert longest <= state.tables_GRL.shape[2], "the rows' tables are shorter than the step's"
    num_chunks = min(MOST_CHUNKS, triton.cdiv(max(max_tokens, longest, 1), BLOCK))
    _gather_kernel[(max_rows + 1, num_chunks)](
        state.tokens_RM,
        state.computed_R,
        state.tables_GRL,
        scheduled.rows_S,
        scheduled.num_tokens_S,
        scheduled.count_1,
        out.ids_T,
        out.positions_T,
        out.query_starts_S1,
        out.context_lens_S,
        out.slots_GT,
        out.block_tables_GSL,
        state.tokens_RM.stride(0),
        state.tables_GRL.stride(0),
        state.tables_GRL.stride(1),
        max_tokens,
        max_rows,
        longest,
        NUM_GROUPS=len(out.slots_GT),
        BLOCK_SIZE=state.block_size,
        ROWS=next_power_of_2(max_rows),
        BLOCK=BLOCK,
    )
    return out.inputs


@triton.jit
def _keys(deltas_ptr, at, inside):
    """The places that deltas write to, as numbers: 7 bits of group, 25 of row, 31 of index."""
    group = tl.load(deltas_ptr + 4 * at, mask=inside, other=0).to(tl.int64)
    row = tl.load(deltas_ptr + 4 * at + 1, mask=inside, other=0).to(tl.int64)
    index = tl.load(deltas_ptr + 4 * at + 2, mask=inside, other=0).to(tl.int64)
    key = (group + 2) * (1 << 56) + row * (1 << 31) + index
    return group, row, index, tl.where(inside, key, -1)


@triton.jit
def _deltas_kernel(
    deltas_ptr,
    count_ptr,
    tokens_ptr,
    computed_ptr,
    tables_ptr,
    token_stride,
    table_group,
    table_stride,
    DELTAS: tl.constexpr,
    LATER: tl.constexpr,
):
    count = tl.load(count_ptr)
    for first in range(tl.program_id(0) * DELTAS, count, tl.num_programs(0) * DELTAS):
        at = first + tl.arange(0, DELTAS)
        inside = at < count
        group, row, index, key = _keys(deltas_ptr, at, inside)
        # Of several deltas for one place the last counts: it alone is written.
        num_later = tl.zeros([DELTAS], dtype=tl.int32)
        for other in range(first, count, LATER):
            later = other + tl.arange(0, LATER)
            _, _, _, later_key = _keys(deltas_ptr, later, later < count)
            hides = (key[:, None] == later_key[None, :]) & (at[:, None] < later[None, :])
            num_later += tl.sum(hides.to(tl.int32), axis=1)
        inside = inside & (num_later == 0)
        value = tl.load(deltas_ptr + 4 * at + 3, mask=inside, other=0)
        entry = tables_ptr + group * table_group + row * table_stride + index
        tl.store(entry, value, mask=inside & (group >= 0))
        tl.store(computed_ptr + row, value.to(tl.int64), mask=inside & (group == COMPUTED))
        tl.store(tokens_ptr + row * token_stride + index, value, mask=inside & (group == TOKEN))


def apply_deltas(state: RowTensors, deltas_W4: torch.Tensor, count_1: torch.Tensor) -> None:
    """Write the first count_1 deltas (int32, in device memory) to the rows, the last one of those
    for one place.

    deltas: int32, contiguous, (group, row, index, value): a block id of a table; with the group
    COMPUTED (index 0) a row's computed tokens, with TOKEN the token at a position. Prompts are
    better copied as they are.
    """
    assert deltas_W4.is_contiguous() and deltas_W4.dtype == torch.int32
    num_programs = min(DELTA_PROGRAMS, triton.cdiv(len(deltas_W4), DELTAS))
    if num_programs == 0:
        return
    _deltas_kernel[(num_programs,)](
        deltas_W4,
        count_1,
        state.tokens_RM,
        state.computed_R,
        state.tables_GRL,
        state.tokens_RM.stride(0),
        state.tables_GRL.stride(0),
        state.tables_GRL.stride(1),
        DELTAS=DELTAS,
        LATER=LATER,
    )


@triton.jit
def _advance_kernel(
    tokens_ptr,
    computed_ptr,
    rows_ptr,
    count_ptr,
    contexts_ptr,
    samples_ptr,
    num_samples_ptr,
    ids_ptr,
    token_stride,
    max_len,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < tl.load(count_ptr)
    row = tl.load(rows_ptr + at, mask=is_row, other=0).to(tl.int64)
    context = tl.load(contexts_ptr + at, mask=is_row, other=0)
    tl.store(computed_ptr + row, context.to(tl.int64), mask=is_row)

    is_sample = at < tl.load(num_samples_ptr)
    row = tl.load(samples_ptr + 2 * at, mask=is_sample, other=0).to(tl.int64)
    source = tl.load(samples_ptr + 2 * at + 1, mask=is_sample, other=0)
    length = tl.load(contexts_ptr + source, mask=is_sample, other=0)
    token = tl.load(ids_ptr + at, mask=is_sample, other=0).to(tl.int32)
    tl.store(tokens_ptr + row * token_stride + length, token, mask=is_sample & (length < max_len))
    # A row that was forked in this step has computed what its source has; to another this is what
    # was stored above.
    tl.store(computed_ptr + row, length.to(tl.int64), mask=is_sample)


def advance(
    state: RowTensors,
    scheduled: Scheduled,
    context_lens_S: torch.Tensor,
    samples_N2: torch.Tensor,
    num_samples_1: torch.Tensor,
    token_ids_N: torch.Tensor,
) -> None:
    """Store the sampled tokens behind their rows' last token and move the counters, as
    `DeviceRows.advance` does. A second time it changes nothing.

    context_lens: of gather_step, for this step. samples: int32, contiguous, the first num_samples_1
    (int32) of them (row, index among the scheduled rows of the one whose logits it used): the
    row's own, or for a row that this step forked its parent's. token_ids: int64 or int32.
    """
    most = max(len(scheduled.rows_S), len(samples_N2))
    assert len(token_ids_N) == len(samples_N2), "one token for each sampling row"
    assert samples_N2.is_contiguous() and samples_N2.dtype == torch.int32
    if most == 0:
        return
    _advance_kernel[(triton.cdiv(most, ADVANCED),)](
        state.tokens_RM,
        state.computed_R,
        scheduled.rows_S,
        scheduled.count_1,
        context_lens_S,
        samples_N2,
        num_samples_1,
        token_ids_N,
        state.tokens_RM.stride(0),
        state.tokens_RM.shape[1],
        BLOCK=ADVANCED,
    )


_STATE = {"tokens_ptr": "*i32", "computed_ptr": "*i64", "tables_ptr": "*i32"}
_STRIDES = {"token_stride": "i32", "table_group": "i32", "table_stride": "i32"}
_SCHEDULED = {"rows_ptr": "*i32", "num_tokens_ptr": "*i32", "count_ptr": "*i32"}
_OUT = {"ids_ptr": "*i64", "positions_ptr": "*i64", "starts_ptr": "*i32", "contexts_ptr": "*i32"}
_OUT_GROUPS = {"slots_ptr": "*i64", "step_tables_ptr": "*i32"}
_SIZES = {"max_tokens": "i32", "max_rows": "i32", "longest": "i32"}

CONFIGS = [
    *(
        Config(
            _gather_kernel,
            _STATE | _STRIDES | _SCHEDULED | _OUT | _OUT_GROUPS | _SIZES,
            {"NUM_GROUPS": num_groups, "BLOCK_SIZE": 16, "ROWS": rows, "BLOCK": BLOCK},
        )
        for num_groups, rows in ((1, 1), (1, 256), (2, 1024))
    ),
    Config(
        _deltas_kernel,
        _STATE | _STRIDES | {"deltas_ptr": "*i32", "count_ptr": "*i32"},
        {"DELTAS": DELTAS, "LATER": LATER},
    ),
    Config(
        _advance_kernel,
        {
            "tokens_ptr": "*i32",
            "computed_ptr": "*i64",
            "rows_ptr": "*i32",
            "count_ptr": "*i32",
            "contexts_ptr": "*i32",
            "samples_ptr": "*i32",
            "num_samples_ptr": "*i32",
            "ids_ptr": "*i64",
            "token_stride": "i32",
            "max_len": "i32",
        },
        {"BLOCK": ADVANCED},
    ),
]
