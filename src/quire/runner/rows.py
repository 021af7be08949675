"""Rows: the state of running sequences on the device. The host writes only what changed.

The order of a plan is kept: rows started, then forked, then the rest. A row that is reused is safe
because all work has one order: what a plan writes is written after every step before it has ended.
Counters change last in a step (`advance`), so a step that failed leaves the rows as they were.

Shape legend: R rows, M tokens a row can hold, N sampling rows, Q result slots, F forks.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Plan, RowFork
from quire.ops import row_state
from quire.ops.host_memory import lazy_zeros, to_device
from quire.ops.row_arrays import RowArrays
from quire.ops.row_state import RowTensors
from quire.runner.column_tensors import empty_columns
from quire.runner.columns import PROMPT_COLUMN
from quire.runner.device import Arrival, Device, Tensors, Work
from quire.runner.plan_parts import Forks
from quire.runner.row_updates import RowUpdates
from quire.runner.sampling_flags import Flags, SamplingFlags
from quire.runner.step_ops import Asked, Gathered, Sampling, StepLists, StepOps, Update

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

NUM_RESULTS = 8  # steps whose tokens are on their way


def empty_rows(
    device: torch.device, max_num_rows: int, max_model_len: int, num_groups: int, block_size: int
) -> RowTensors:
    """Make the state of max_num_rows rows of up to max_model_len tokens."""
    num_blocks = -(-max_model_len // block_size) + 1
    return RowTensors(
        lazy_zeros((max_num_rows, max_model_len), torch.int32, device),
        lazy_zeros((max_num_rows,), torch.int64, device),
        lazy_zeros((num_groups, max_num_rows, num_blocks), torch.int32, device),
        *empty_columns(max_num_rows, device),
        block_size=block_size,
        prompt_column=PROMPT_COLUMN,
    )


def as_tensors(rows: RowArrays) -> RowTensors:
    """Return tensors over the memory of these rows."""
    return RowTensors(
        torch.from_numpy(rows.tokens_RM),
        torch.from_numpy(rows.computed_R),
        torch.from_numpy(rows.tables_GRL),
        torch.from_numpy(rows.narrow_CR),
        torch.from_numpy(rows.wide_CR),
        rows.block_size,
        PROMPT_COLUMN,
    )


class DeviceRows:
    """The rows of a device.

    results_QR: tokens of the last steps, -1 where there was none to choose. prompt_lens: the host's
    copy of the rows' prompt lengths.
    """

    def __init__(self, device: Device, state: RowTensors, ops: StepOps) -> None:
        self.state, self.ops = state, ops
        self._device = device
        num_rows = len(state.computed_R)
        self.results_QR = torch.zeros(
            NUM_RESULTS, num_rows, dtype=torch.int32, device=device.device
        )
        self.prompt_lens: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._result_slot = 0
        self._forks = Forks()

    @property
    def max_num_rows(self) -> int:
        return len(self.prompt_lens)

    @property
    def max_model_len(self) -> int:
        return self.state.tokens_RM.shape[1]

    def apply(self, plan: Plan, has_edits: Flags, asked: Asked) -> tuple[Update, int]:
        """Get a plan's changes ready, to be taken by the step's own work (`run_with`).

        has_edits: whether rows, of all, are masked or biased, with this plan. asked: what the
        plan's sampling rows asked for. Also returns the slot where the step's tokens go.
        """
        updates = self.changes(plan, has_edits)
        self._result_slot = (self._result_slot + 1) % NUM_RESULTS
        places = plan.sample_places
        lengths = (plan.computed_bound + plan.num_tokens)[places]
        sampling = Sampling(asked, lengths, self.prompt_lens[plan.sample_rows])
        lists = StepLists(plan.rows, plan.num_tokens, sampling, places, self._result_slot)
        return self.ops.prepare(updates, lists), self._result_slot

    def changes(self, plan: Plan, has_edits: Flags) -> RowUpdates:
        """Return what a plan changes of the rows, before its step. What has to come before, such as
        forks, is done behind what was given before."""
        updates = RowUpdates()
        for start in plan.started:
            self.prompt_lens[start.row] = start.num_prompt_tokens
            updates.add_start(start, start.row if has_edits[start.row] else -1)
        if plan.forked:
            self.run_with(self.ops.prepare(updates, None), list)
            updates = self._fork(plan, has_edits)
        self._add_rest(plan, updates)
        return updates

    def settle(
        self, rows: Int32, contexts: Int64, sampling: Int32, lengths: Int64, token_ids: Int32
    ) -> None:
        """Move the counters of rows to what they have, [S] each, and store the tokens that others,
        or some of them, have chosen, [N], behind so many of their tokens."""
        arrays = [each.astype(np.int64) for each in (rows, contexts, sampling, lengths, token_ids)]

        def work() -> Tensors:
            row_state.advance(self.state, *(to_device(each, self.state.device) for each in arrays))
            return []

        self._device.run(work)

    def expect_nothing(self) -> None:
        """Get ready for a step of no rows: for what is run or recorded without a plan."""
        nothing, flags = Plan(step_id=-1), SamplingFlags.of_rows(0)
        update, _ = self.apply(nothing, flags.has_edits, Asked(nothing.sample_rows, flags, {}))
        self.run_with(update, list)

    def run_with(self, update: Update, work: Work) -> Arrival:
        """Take changes, then do the work, as one piece."""

        def both() -> Tensors:
            update.take()
            return work()

        try:
            arrival = self._device.run(both)
        except Exception:
            update.hold(self._device.run(list))  # it may be read until here
            raise
        update.hold(arrival)
        return arrival

    def result(self, slot: int, num_samples: int) -> torch.Tensor:
        """Return the tokens of a step, int32 [N]."""
        return self.results_QR[slot, :num_samples]

    def advance(self, gathered: Gathered, ids_N: torch.Tensor, is_valid_N: torch.Tensor) -> None:
        """Store the chosen tokens behind their rows' last token, and move the counters."""
        self.ops.advance(gathered, ids_N, is_valid_N, self.results_QR)

    def _fork(self, plan: Plan, has_edits: Flags) -> RowUpdates:
        """Copy rows; returns in what the children differ from their parents."""
        updates, batch = RowUpdates(), list[RowFork]()
        for fork in self._forks.to_do(plan):
            touched = {row for each in batch for row in (each.parent, each.child)}
            if fork.child in touched or fork.parent in {each.child for each in batch}:
                self._copy(batch)
                batch = []
            batch.append(fork)
        self._copy(batch)
        for fork in plan.forked:
            self.prompt_lens[fork.child] = self.prompt_lens[fork.parent]
            updates.add_fork(fork, has_edits=bool(has_edits[fork.child]))
        return updates

    def _copy(self, batch: list[RowFork]) -> None:
        if batch:
            self.ops.fork(np.array([(fork.parent, fork.child) for fork in batch], np.int32))
            self._forks.did(*batch)

    def _add_rest(self, plan: Plan, updates: RowUpdates) -> None:
        for host in plan.host_tokens:
            if host.is_prompt:
                self.prompt_lens[host.row] = host.position + len(host.token_ids)
        updates.add_plan(plan)
