"""Cases of the kernels that keep the rows' state: a step's inputs, what changes before it, its end.

Shape legend: R rows, all of which have one new token, half of their longest context long.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost
from quire.ops.kernels import row_deltas
from quire.ops.kernels import step_inputs as kernel
from quire.ops.rows.row_state import RowTensors

BLOCK_SIZE, COLUMNS = 16, 8
FORKS = 8


@dataclass(frozen=True)
class Step:
    """A step that serves all rows, and what it is made from."""

    state: RowTensors
    inbox: kernel.Inbox
    buffers: kernel.StepBuffers
    order: torch.Tensor  # 0 to R - 1, int32
    longest: int  # blocks


def step_of(bench: Bench, rows: int) -> Step:
    device, length = bench.device, bench.pick(4096, 64)
    longest = length // BLOCK_SIZE
    state = RowTensors(
        torch.zeros(rows, length, dtype=torch.int32, device=device),
        torch.full((rows,), length // 2, dtype=torch.int64, device=device),
        bench.randint(1000, 1, rows, longest, dtype=torch.int32),
        torch.zeros(COLUMNS, rows, dtype=torch.int32, device=device),
        torch.zeros(COLUMNS, rows, dtype=torch.int64, device=device),
        BLOCK_SIZE,
    )
    order = torch.arange(rows, dtype=torch.int32, device=device)
    inbox = kernel.Inbox.empty(rows, device)
    inbox.words[:2] = rows
    pairs = torch.stack((order, order), 1).flatten()
    inbox.words[kernel.HEADER :] = torch.cat((order, torch.ones_like(order), pairs))
    buffers = kernel.StepBuffers.empty(rows, rows, 1, longest, device)
    kernel.gather_step(state, inbox, buffers)
    return Step(state, inbox, buffers, order, longest)


def gather_case(bench: Bench, rows: int) -> Made:
    """Make a gather. It reads ids, positions and slots of the tokens, and four numbers of each
    sampling row. It reads the tables as far as contexts go, and writes -1 after."""
    step = step_of(bench, rows)
    cost = Cost(num_bytes=rows * (4 + 7 * 8) + rows * step.longest * (2 + 4))
    return lambda: kernel.gather_step(step.state, step.inbox, step.buffers), cost


def advance_case(bench: Bench, rows: int) -> Made:
    step = step_of(bench, rows)
    ids, is_valid = step.order.long(), torch.ones(rows, dtype=torch.bool, device=bench.device)
    results = torch.zeros(4, rows, dtype=torch.int32, device=bench.device)
    contexts, cost = step.buffers.context_lens_S, Cost(num_bytes=rows * (4 + 8 + 8 + 8 + 8 + 1))
    return lambda: kernel.advance(step.state, step.inbox, contexts, ids, is_valid, results), cost


def receive_case(bench: Bench, rows: int) -> Made:
    """Make the receipt of a step's lists, and a new block for each row, from pinned memory."""
    step, layout = step_of(bench, rows), row_deltas.SlotLayout(rows, rows, 1, 1)
    words = torch.zeros(layout.num_words, dtype=torch.int32)
    words[: layout.deltas_at] = step.inbox.words.cpu()
    index, group = torch.full((rows,), step.longest - 1), torch.zeros(rows)
    order = torch.arange(rows)
    deltas = torch.stack((group, order, index, order), 1).int().flatten()
    words[layout.deltas_at : layout.runs_at] = deltas
    slot = words.pin_memory() if bench.is_cuda else words
    cost = Cost(num_bytes=2 * 4 * layout.deltas_at + deltas.nbytes + 4 * rows)
    return lambda: row_deltas.receive(step.state, step.inbox, slot, layout, rows, 0, True), cost


def fork_case(bench: Bench, rows: int) -> Made:
    """Make forks: some rows become copies of others, with all tokens, tables and columns."""
    step, num = step_of(bench, rows), min(FORKS, rows // 2)
    layout = row_deltas.SlotLayout(rows, 1, 1, 1)
    slot = torch.zeros(layout.num_words, dtype=torch.int32, device=bench.device)
    forks = torch.stack((step.order[:num], step.order[num : 2 * num]), 1).flatten()
    slot[layout.forks_at : layout.forks_at + 2 * num] = forks
    row = 4 * step.longest * (BLOCK_SIZE + 1) + 12 * COLUMNS
    return lambda: row_deltas.copy_rows(step.state, slot, layout, num), Cost(
        num_bytes=2 * num * row
    )


# By module and what is timed.
CASES: dict[tuple[str, str], Callable[[Bench, int], Made]] = {
    ("step_inputs", "gather"): gather_case,
    ("step_inputs", "advance"): advance_case,
    ("row_deltas", "receive"): receive_case,
    ("row_deltas", "forks"): fork_case,
}
