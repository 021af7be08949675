"""Update the rows' state on a GPU before a step, in one launch that reads the host's memory.

The host packs a slot, in pinned memory, and launches `receive`. Its programs read the slot over the
bus, put the step's lists into the inbox and write each delta to its place. Nothing is copied
before, and no thread waits. A slot must not be written again before the launch has ended. A slot
is, in words (int32),

    [inbox | deltas, 4 words each | runs, 4 words each | forks, 2 words each | tokens of the runs]

    delta   (kind, row, index, value), as in `quire.ops.rows.row_state`
    run     (row, position, first of the slot's tokens, how many): tokens that the row holds
    fork    (parent, child)

No two deltas of a slot may write to one place, and no two runs either.

Expected on an H200: 4 to 6 us for a step's lists and some hundred deltas: two trips over
the bus and a launch. Prompts come at the bus's 50 GB/s: 8,192 tokens are 32 KB.

Shape legend: R rows, M tokens a row can hold, G cache groups, L blocks of the longest context, C
columns, F forks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2
from quire.ops.kernels.step_inputs import Inbox, inbox_words
from quire.ops.rows.row_arrays import COMPUTED, NARROW, WIDE
from quire.ops.rows.row_state import RowTensors

MAX_RUN_TOKENS = 2048  # tokens; longer runs are cut, so that several programs write them
BLOCK = 256
PROGRAMS = 16
FORK_PROGRAMS = 8  # programs of a fork


@dataclass(frozen=True)
class SlotLayout:
    """Capacity of a slot, and where its parts begin, in words."""

    max_rows: int
    max_deltas: int
    max_runs: int
    max_tokens: int

    @property
    def deltas_at(self) -> int:
        return inbox_words(self.max_rows)

    @property
    def runs_at(self) -> int:
        return self.deltas_at + 4 * self.max_deltas

    @property
    def forks_at(self) -> int:
        return self.runs_at + 4 * self.max_runs

    @property
    def tokens_at(self) -> int:
        return self.forks_at + 2 * self.max_rows

    @property
    def num_words(self) -> int:
        return self.tokens_at + self.max_tokens


@triton.jit
def _write_deltas(
    deltas_ptr, num_deltas, tables_ptr, computed_ptr, narrow_ptr, wide_ptr, table_group,
    table_stride, num_rows, COMPUTED: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, num_deltas, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < num_deltas
        kind = tl.load(deltas_ptr + 4 * at, mask=inside, other=0)
        row = tl.load(deltas_ptr + 4 * at + 1, mask=inside, other=0).to(tl.int64)
        index = tl.load(deltas_ptr + 4 * at + 2, mask=inside, other=0).to(tl.int64)
        value = tl.load(deltas_ptr + 4 * at + 3, mask=inside, other=0)
        entry = tables_ptr + kind.to(tl.int64) * table_group + row * table_stride + index
        tl.store(entry, value, mask=inside & (kind >= 0))
        tl.store(computed_ptr + row, value.to(tl.int64), mask=inside & (kind == COMPUTED))
        tl.store(narrow_ptr + index * num_rows + row, value, mask=inside & (kind == NARROW))
        half = wide_ptr + 2 * ((index // 2) * num_rows + row) + index % 2
        tl.store(half, value, mask=inside & (kind == WIDE))


@kernel(
    do_not_specialize=["num_words", "num_deltas", "num_runs", "deltas_at", "runs_at", "texts_at"]
)
def _receive_kernel(
    slot_ptr, inbox_ptr, tokens_ptr, computed_ptr, tables_ptr, narrow_ptr, wide_ptr,
    num_words, num_deltas, num_runs, deltas_at, runs_at, texts_at,
    token_stride, table_group, table_stride, num_rows,
    COMPUTED: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    for first in range(program * BLOCK, num_words, step * BLOCK):
        at = first + tl.arange(0, BLOCK)
        word = tl.load(slot_ptr + at, mask=at < num_words, other=0)
        tl.store(inbox_ptr + at, word, mask=at < num_words)
    _write_deltas(
        slot_ptr + deltas_at, num_deltas, tables_ptr, computed_ptr, narrow_ptr, wide_ptr,
        table_group, table_stride, num_rows, COMPUTED, NARROW, WIDE, BLOCK,
    )  # fmt: skip
    for run in range(program, num_runs, step):
        run_ptr = slot_ptr + runs_at + 4 * run
        row, position = tl.load(run_ptr).to(tl.int64), tl.load(run_ptr + 1)
        from_ptr = slot_ptr + texts_at + tl.load(run_ptr + 2)
        length = tl.load(run_ptr + 3)
        for first in range(0, length, BLOCK):
            at = first + tl.arange(0, BLOCK)
            token = tl.load(from_ptr + at, mask=at < length, other=0)
            tl.store(tokens_ptr + row * token_stride + position + at, token, mask=at < length)


def receive(
    state: RowTensors,
    inbox: Inbox,
    slot: torch.Tensor,
    layout: SlotLayout,
    num_deltas: int,
    num_runs: int,
    has_lists: bool,
) -> None:
    """Apply a slot's first num_deltas deltas and num_runs runs to the rows' state.

    has_lists: whether to copy the slot's lists to the inbox too. slot: int32 [layout.num_words],
    pinned memory or the device's own.
    """
    assert inbox.max_rows == layout.max_rows and len(slot) == layout.num_words
    num_words = layout.deltas_at if has_lists else 0
    units = max(triton.cdiv(num_words, BLOCK), triton.cdiv(num_deltas, BLOCK), num_runs)
    if units == 0:
        return
    counts = num_words, num_deltas, num_runs
    arguments = receive_arguments(state, inbox, slot, layout, counts)
    _receive_kernel[(min(PROGRAMS, units),)](*arguments, **RECEIVE_CONSTANTS)


RECEIVE_CONSTANTS = {"COMPUTED": COMPUTED, "NARROW": NARROW, "WIDE": WIDE, "BLOCK": BLOCK}


def receive_arguments(
    state: RowTensors,
    inbox: Inbox,
    slot: torch.Tensor,
    layout: SlotLayout,
    counts: tuple[int, int, int],
) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments of the kernel, for launches that do not go through Triton. counts:
    numbers of words, deltas and runs. slot: int32 [layout.num_words]."""
    return (
        slot,
        inbox.words,
        state.tokens_RM,
        state.computed_R,
        state.tables_GRL,
        state.narrow_CR,
        state.wide_CR.view(torch.int32),
        *counts,
        layout.deltas_at,
        layout.runs_at,
        layout.tokens_at,
        state.tokens_RM.stride(0),
        state.tables_GRL.stride(0),
        state.tables_GRL.stride(1),
        len(state.computed_R),
    )


@kernel(do_not_specialize=["forks_at"])
def _fork_kernel(
    slot_ptr, forks_at, tokens_ptr, computed_ptr, tables_ptr, narrow_ptr, wide_ptr,
    token_stride, table_group, table_stride, num_rows, max_len, longest,
    NUM_GROUPS: tl.constexpr, NUM_NARROW: tl.constexpr, NUM_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    fork_ptr = slot_ptr + forks_at + 2 * tl.program_id(0)
    parent, child = tl.load(fork_ptr).to(tl.int64), tl.load(fork_ptr + 1).to(tl.int64)
    begin, step = tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
    for first in range(begin, max_len, step):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + parent * token_stride + at, mask=at < max_len, other=0)
        tl.store(tokens_ptr + child * token_stride + at, token, mask=at < max_len)
    for first in range(begin, longest, step):
        at = first + tl.arange(0, BLOCK)
        for g in tl.static_range(NUM_GROUPS):
            table_ptr = tables_ptr + g * table_group
            block = tl.load(table_ptr + parent * table_stride + at, mask=at < longest, other=0)
            tl.store(table_ptr + child * table_stride + at, block, mask=at < longest)
    if begin == 0:
        tl.store(computed_ptr + child, tl.load(computed_ptr + parent))
        column = tl.arange(0, COLUMNS).to(tl.int64) * num_rows
        is_narrow = tl.arange(0, COLUMNS) < NUM_NARROW
        narrow = tl.load(narrow_ptr + column + parent, mask=is_narrow, other=0)
        tl.store(narrow_ptr + column + child, narrow, mask=is_narrow)
        is_wide = tl.arange(0, COLUMNS) < NUM_WIDE
        wide = tl.load(wide_ptr + column + parent, mask=is_wide, other=0)
        tl.store(wide_ptr + column + child, wide, mask=is_wide)


def copy_rows(state: RowTensors, slot: torch.Tensor, layout: SlotLayout, num_forks: int) -> None:
    """Make the children of a slot's first num_forks forks equal to their parents: tokens, counters,
    block tables, columns. slot: int32 [layout.num_words]. No child may be another fork's parent or
    child."""
    if num_forks == 0:
        return
    num_narrow, num_wide = len(state.narrow_CR), len(state.wide_CR)
    num_groups, num_rows, longest = state.tables_GRL.shape
    _fork_kernel[(num_forks, FORK_PROGRAMS)](
        slot,
        layout.forks_at,
        state.tokens_RM,
        state.computed_R,
        state.tables_GRL,
        state.narrow_CR,
        state.wide_CR,
        state.tokens_RM.stride(0),
        state.tables_GRL.stride(0),
        state.tables_GRL.stride(1),
        num_rows,
        state.tokens_RM.shape[1],
        longest,
        NUM_GROUPS=num_groups,
        NUM_NARROW=num_narrow,
        NUM_WIDE=num_wide,
        COLUMNS=next_power_of_2(max(num_narrow, num_wide)),
        BLOCK=BLOCK,
    )


_STATE = {
    "slot_ptr": "*i32",
    "tokens_ptr": "*i32",
    "computed_ptr": "*i64",
    "tables_ptr": "*i32",
    "narrow_ptr": "*i32",
    "token_stride": "i32",
    "table_group": "i32",
    "table_stride": "i32",
    "num_rows": "i32",
}
_COUNTS = ("num_words", "num_deltas", "num_runs", "deltas_at", "runs_at", "texts_at")

CONFIGS = [
    Config(
        _receive_kernel,
        _STATE | {"inbox_ptr": "*i32", "wide_ptr": "*i32"} | dict.fromkeys(_COUNTS, "i32"),
        RECEIVE_CONSTANTS,
    ),
    *(
        Config(
            _fork_kernel,
            _STATE
            | dict.fromkeys(("forks_at", "max_len", "longest"), "i32")
            | {"wide_ptr": "*i64"},
            {
                "NUM_GROUPS": num_groups,
                "NUM_NARROW": 7,
                "NUM_WIDE": 4,
                "COLUMNS": 8,
                "BLOCK": BLOCK,
            },
        )
        for num_groups in (1, 2)
    ),
]
