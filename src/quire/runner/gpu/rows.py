"""The rows' state on a GPU, and what a plan changes of it: packed by the host, done by the device.

State and changes are those of `quire.runner.rows`; the order of a plan is kept: rows started, then
forked, then the rest. A row that is reused is safe because all work has one order: what a plan
writes is written after every step before it has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Plan, RowFork
from quire.ops.kernels.row_deltas import COMPUTED, NARROW, copy_rows, receive
from quire.ops.kernels.step_inputs import Inbox, RowTensors
from quire.runner.gpu.columns import (
    NARROW_COLUMNS,
    PROMPT_COLUMN,
    empty_columns,
    start_deltas,
    wide_deltas,
)
from quire.runner.gpu.device import Arrival, Device, Tensors, Work
from quire.runner.gpu.slots import Changes, Filled, Part, Slot, SlotRing
from quire.runner.plan_parts import Forks

Int32 = npt.NDArray[np.int32]

NUM_RESULTS = 8  # steps whose tokens are on their way


@dataclass(frozen=True)
class Packed:
    """Changes in a slot. receive: the launch that takes them, before anything else of the step.
    result_slot: where the step's tokens go."""

    result_slot: int
    slot: Slot
    receive: Callable[[], None]


class GpuRows:
    """max_num_rows rows of up to max_model_len tokens.

    results_QS: tokens of the last steps, one after the other. prompt_lens: the host's copy.
    """

    def __init__(
        self,
        device: Device,
        max_num_rows: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
    ) -> None:
        self._device = device
        torch_device = device.device
        num_blocks = -(-max_model_len // block_size) + 1
        narrow_CR, wide_CR = empty_columns(max_num_rows, torch_device)

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=torch_device)

        self.state = RowTensors(
            tokens_RM=zeros(torch.int32, max_num_rows, max_model_len),
            computed_R=zeros(torch.int64, max_num_rows),
            tables_GRL=zeros(torch.int32, num_groups, max_num_rows, num_blocks),
            narrow_CR=narrow_CR,
            wide_CR=wide_CR,
            block_size=block_size,
            prompt_column=PROMPT_COLUMN,
        )
        self.inbox = Inbox.empty(max_num_rows, torch_device)
        self.results_QS = zeros(torch.int32, NUM_RESULTS, max_num_rows)
        self.prompt_lens = np.zeros(max_num_rows, np.int64)
        self._ring = SlotRing(device, max_num_rows)
        self._result_slot = 0
        self._forks = Forks()

    @property
    def max_num_rows(self) -> int:
        return len(self.prompt_lens)

    def apply(self, plan: Plan, has_edits: Callable[[int], bool]) -> Packed:
        """Pack a plan's changes. What has to come before, such as forks, is launched; the rest is
        for the step's own work. has_edits: of a row."""
        changes = Changes()
        for start in plan.started:
            self.prompt_lens[start.row] = start.num_prompt_tokens
            edits = start.row if has_edits(start.row) else -1
            changes.deltas.append(start_deltas(start, edits))
            if len(start.token_ids):
                changes.runs.append((start.row, 0, start.token_ids))
        if plan.forked:
            self._send(self._ring.pack(changes))
            changes = self._fork(plan, has_edits)
        self._add_rest(plan, changes)
        self._result_slot = (self._result_slot + 1) % NUM_RESULTS
        return self._pack(changes, plan)

    def empty_inbox(self) -> None:
        """A step of no rows comes next: for what is run or recorded without a plan."""
        self.run_with(self._pack(Changes(), Plan(step_id=-1)), list)

    def run_with(self, packed: Packed, work: Work) -> Arrival:
        """Take what was packed, then do the work, as one piece."""

        def both() -> Tensors:
            packed.receive()
            return work()

        try:
            packed.slot.used = self._device.run(both)
        except Exception:
            packed.slot.used = self._device.run(list)  # the slot may be read until here
            raise
        return packed.slot.used

    def _fork(self, plan: Plan, has_edits: Callable[[int], bool]) -> Changes:
        """Launch the copies; returns in what the children differ from their parents."""
        changes, batch = Changes(), list[RowFork]()
        for fork in self._forks.to_do(plan):
            touched = {row for each in batch for row in (each.parent, each.child)}
            if fork.child in touched or fork.parent in {each.child for each in batch}:
                self._send_forks(batch)
                batch = []
            batch.append(fork)
        self._send_forks(batch)
        for fork in plan.forked:
            self.prompt_lens[fork.child] = self.prompt_lens[fork.parent]
            own = wide_deltas(fork.child, "sample_index", fork.sample_index)
            if has_edits(fork.child):
                own.append(edits_delta(fork.child))
            changes.deltas.append(np.array(own, np.int32))
        return changes

    def _send_forks(self, batch: list[RowFork]) -> None:
        if not batch:
            return
        slot, layout, state = self._ring.take(), self._ring.layout, self.state
        pairs = np.array([(fork.parent, fork.child) for fork in batch], np.int32).ravel()
        slot.array[layout.forks_at : layout.forks_at + len(pairs)] = pairs

        def work() -> list[torch.Tensor]:
            copy_rows(state, slot.words, layout, len(batch))
            return []

        slot.used = self._device.run(work)
        self._forks.did(*batch)

    def _add_rest(self, plan: Plan, changes: Changes) -> None:
        """What comes after rows have started and were forked."""
        for row, num_tokens in plan.truncated:
            changes.deltas.append(np.array([(COMPUTED, row, 0, num_tokens)], np.int32))
        for host in plan.host_tokens:
            changes.runs.append((host.row, host.position, host.token_ids))
            if host.is_prompt:
                end = host.position + len(host.token_ids)
                self.prompt_lens[host.row] = end
                deltas = wide_deltas(host.row, "num_prompt_tokens", end)
                changes.deltas.append(np.array(deltas, np.int32))
        writes = plan.block_writes
        if len(writes.row):
            columns = (writes.group, writes.row, writes.index, writes.block_id)
            changes.deltas.append(np.stack(columns, axis=1))

    def _pack(self, changes: Changes, plan: Plan) -> Packed:
        """Launch all parts of the changes but the last, which goes with the plan's lists."""
        *parts, last = self._ring.pack(changes)
        self._send(parts)
        filled = self._ring.fill(self._ring.take(), last)
        header = len(plan.rows), len(plan.sample_rows), self._result_slot
        lists = plan.rows, plan.num_tokens, sample_pairs(plan)
        self._ring.write_lists(filled.slot, header, lists)
        return Packed(self._result_slot, filled.slot, lambda: self._receive(filled, True))

    def _send(self, parts: Sequence[Part]) -> None:
        for part in parts:
            filled = self._ring.fill(self._ring.take(), part)

            def work(filled: Filled = filled) -> list[torch.Tensor]:
                self._receive(filled, False)
                return []

            filled.slot.used = self._device.run(work)

    def _receive(self, filled: Filled, has_lists: bool) -> None:
        counts = filled.num_deltas, filled.num_runs
        receive(self.state, self.inbox, filled.slot.words, self._ring.layout, *counts, has_lists)


def edits_delta(row: int) -> tuple[int, int, int, int]:
    """The row has a place among edits."""
    return NARROW, row, NARROW_COLUMNS.index("edits"), row


def sample_pairs(plan: Plan) -> Int32:
    """[N, 2] sampling rows and their places."""
    if len(plan.sample_rows) == 0:
        return np.empty((0, 2), np.int32)
    pairs: Int32 = np.stack((plan.sample_rows, plan.sample_places), axis=1).astype(np.int32)
    return pairs
