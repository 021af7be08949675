"""Rows: the state of running sequences on the device. The host writes only what changed. No torch.

This file derives from each plan its changes to the rows, for every implementation of `StepOps`
(`step_ops.py`). The order is fixed: rows started, then forked, then all other changes. A row can be
reused safely because all work has one order: a plan writes it after every earlier step has ended.
Counters change last in a step (`StepOps.advance`), so a failed step leaves the rows unchanged.

Shape legend: R rows, M tokens a row can hold, N sampling rows, Q result slots, F forks.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan, RowFork, RowStart
from quire.ops.rows.row_arrays import COMPUTED, NARROW, WIDE
from quire.runner.device import Arrival, Device, Graph, Tensors, Work
from quire.runner.step_ops import (
    NUM_RESULTS,
    Flags,
    RowUpdates,
    Sampling,
    SamplingFlags,
    SamplingRequests,
    StepLists,
    StepOps,
    Update,
)

Int32 = npt.NDArray[np.int32]

# Sampling parameters of a row: columns of its state.
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
# The row's index among edits, or -1; 0 or 1; draft tokens in the last step with drafts.
NARROW_COLUMNS = (*FLOATS, "edits", "penalised", "drafts")
WIDE_COLUMNS = ("top_k", "seed", "sample_index", "num_prompt_tokens")
PROMPT_COLUMN = WIDE_COLUMNS.index("num_prompt_tokens")

_KINDS = (COMPUTED, *[NARROW] * len(NARROW_COLUMNS), *[WIDE] * (2 * len(WIDE_COLUMNS)))
_INDICES = (0, *range(len(NARROW_COLUMNS)), *range(2 * len(WIDE_COLUMNS)))


class Forks:
    """Record of the forks of a step that were carried out. A repeated step does not fork again,
    because the plan may have changed the parent's table since."""

    def __init__(self) -> None:
        self._step_id = -1
        self._done: set[RowFork] = set()

    def pending(self, plan: Plan) -> list[RowFork]:
        """Return the forks that no earlier attempt at this step has carried out."""
        if plan.step_id != self._step_id:
            self._step_id, self._done = plan.step_id, set()
        return [fork for fork in plan.forked if fork not in self._done]

    def mark_done(self, *forks: RowFork) -> None:
        self._done.update(forks)


class DeviceRows:
    """Rows of a device. state: `RowTensors`, or `RowArrays` without torch. prompt_lens: the host's
    copy of the rows' prompt lengths. forks: of the last step, carried out once by all runners of
    these rows."""

    def __init__(self, device: Device, state: Any, ops: StepOps) -> None:
        self.state, self.ops = state, ops
        self._device = device
        self.prompt_lens: npt.NDArray[np.int64] = np.zeros(len(state.computed_R), np.int64)
        self._result_slot = 0
        self.forks = Forks()

    @property
    def max_num_rows(self) -> int:
        return len(self.prompt_lens)

    @property
    def max_model_len(self) -> int:
        return int(self.state.tokens_RM.shape[1])

    def apply(
        self, plan: Plan, has_edits: Flags, requested: SamplingRequests
    ) -> tuple[Update, StepLists]:
        """Prepare a plan's changes, which the step's own work applies (`run_with`); return them and
        the step's lists.

        has_edits: whether each row is masked or biased, including this plan's rows. asked:
        requested sampling features of the plan's sampling rows.
        """
        updates = self.changes(plan, has_edits)
        self._result_slot = (self._result_slot + 1) % NUM_RESULTS
        indices = plan.sample_indices
        lengths = plan.computed_bound + plan.num_tokens
        if plan.sample_sources is not plan.rows:
            lengths = lengths[indices]
        sampling = Sampling(requested, lengths, self.prompt_lens[plan.sample_rows])
        lists = StepLists(plan.rows, plan.num_tokens, sampling, indices, self._result_slot)
        return self.ops.prepare(updates, lists), lists

    def changes(self, plan: Plan, has_edits: Flags) -> RowUpdates:
        """Return a plan's changes to the rows before its step. If the plan forks rows, the forks
        are carried out now, after all earlier work."""
        updates = RowUpdates()
        for start in plan.started:
            self.prompt_lens[start.row] = start.num_prompt_tokens
            edit_index = start.row if has_edits[start.row] else -1
            updates.deltas.append(start_deltas(start, edit_index))
            if len(start.token_ids):
                updates.runs.append((start.row, 0, start.token_ids))
        if plan.forked:
            self.run_with(self.ops.prepare(updates, None), list)
            updates = self._fork(plan, has_edits)
        self._add_rest(plan, updates)
        return updates

    def prepare_empty_step(self) -> None:
        """Prepare a step without rows, for work that is run or recorded without a plan."""
        nothing, flags = Plan(step_id=-1), SamplingFlags.of_rows(0)
        update, _ = self.apply(
            nothing, flags.has_edits, SamplingRequests(nothing.sample_rows, flags)
        )
        self.run_with(update, list)

    def run_with(self, update: Update, work: Work, graph: Graph | None = None) -> Arrival:
        """Apply changes and run the work, as one unit. graph: recording of all of the work, if
        there is one."""

        def both() -> Tensors:
            update.take()
            return work()

        try:
            if graph is not None and update.replay is not None:
                arrival = update.replay(graph)
            else:
                arrival = self._device.run(both)
        except Exception:
            update.hold(self._device.run(list))  # the device may read it until here
            raise
        update.hold(arrival)
        return arrival

    def _fork(self, plan: Plan, has_edits: Flags) -> RowUpdates:
        """Copy rows; return the changes by which the children differ from their parents."""
        updates, batch = RowUpdates(), list[RowFork]()
        for fork in self.forks.pending(plan):
            touched = {row for each in batch for row in (each.parent, each.child)}
            if fork.child in touched or fork.parent in {each.child for each in batch}:
                self._copy(batch)
                batch = []
            batch.append(fork)
        self._copy(batch)
        for fork in plan.forked:
            self.prompt_lens[fork.child] = self.prompt_lens[fork.parent]
            own = wide_deltas(fork.child, "sample_index", fork.sample_index)
            if has_edits[fork.child]:
                own.append(edits_delta(fork.child))
            updates.deltas.append(np.array(own, np.int32))
        return updates

    def _copy(self, batch: list[RowFork]) -> None:
        if batch:
            self.ops.fork(np.array([(fork.parent, fork.child) for fork in batch], np.int32))
            self.forks.mark_done(*batch)

    def _add_rest(self, plan: Plan, updates: RowUpdates) -> None:
        """Add the changes that follow started and forked rows."""
        for row, num_tokens in plan.truncated:
            updates.deltas.append(np.array([(COMPUTED, row, 0, num_tokens)], np.int32))
        for host in plan.host_tokens:
            updates.runs.append((host.row, host.position, host.token_ids))
            if host.is_prompt:
                end = host.position + len(host.token_ids)
                self.prompt_lens[host.row] = end
                deltas = wide_deltas(host.row, "num_prompt_tokens", end)
                updates.deltas.append(np.array(deltas, np.int32))
        if len(plan.last_ids):
            _add_positions(plan, updates)
        if plan.drafts:
            _add_drafts(plan, updates, has_column=self.ops.can_be_recorded)
        writes = plan.block_writes
        if len(writes.row):
            columns = (writes.group, writes.row, writes.index, writes.block_id)
            updates.deltas.append(_stacked(columns))


def _stacked(columns: tuple[Int32, ...]) -> Int32:
    """Return the columns [K] as [K, 4]; np.stack takes four times as long."""
    found = np.empty((len(columns[0]), len(columns)), np.int32)
    for i, column in enumerate(columns):
        found[:, i] = column
    return found


def _add_positions(plan: Plan, updates: RowUpdates) -> None:
    """Add the positions of the rows of a model in stages, and the last token that each computes."""
    deltas = np.zeros((len(plan.rows), 4), np.int32)
    deltas[:, 0], deltas[:, 1], deltas[:, 3] = COMPUTED, plan.rows, plan.computed_bound
    updates.deltas.append(deltas)
    rows, positions = plan.rows.tolist(), plan.last_positions.tolist()
    tokens = np.split(plan.last_ids, len(rows))
    updates.runs += zip(rows, positions, tokens, strict=True)


def _add_drafts(plan: Plan, updates: RowUpdates, *, has_column: bool) -> None:
    """Add the host's draft tokens after each row's known tokens. has_column: also write the number
    of draft tokens of each row of the step, which kernels read."""
    if not plan.is_guessing:
        begins = (plan.computed_bound + plan.num_tokens - plan.num_drafts).tolist()
        begin_of = dict(zip(plan.rows.tolist(), begins, strict=True))
        updates.runs += [(each.row, begin_of[each.row], each.token_ids) for each in plan.drafts]
    if has_column:
        rows = np.union1d(plan.rows, plan.sample_rows)
        deltas = np.zeros((len(rows), 4), np.int32)
        deltas[:, 0], deltas[:, 1] = NARROW, rows
        deltas[:, 2] = NARROW_COLUMNS.index("drafts")
        drafting = np.array([each.row for each in plan.drafts], np.int32)
        counts = [len(each.token_ids) for each in plan.drafts]
        deltas[np.searchsorted(rows, drafting), 3] = counts
        updates.deltas.append(deltas)


def start_deltas(start: RowStart, edits: int) -> Int32:
    """Return the deltas [K, 4] that start a row. edits: the row's index among edits, or -1.
    Temperature 0 means greedy sampling."""
    params = start.params
    floats = (
        0.0 if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    seed = (start.seed + 2**63) % 2**64 - 2**63  # any 64 bits, as a signed number
    wide = (max(params.top_k, 0), seed, start.sample_index, start.num_prompt_tokens)
    deltas = np.empty((len(_KINDS), 4), np.int32)
    deltas[:, 0], deltas[:, 1], deltas[:, 2] = _KINDS, start.row, _INDICES
    deltas[0, 3] = start.num_computed_tokens
    deltas[1 : 1 + len(FLOATS), 3] = np.array(floats, np.float32).view(np.int32)
    narrow_end = 1 + len(NARROW_COLUMNS)
    deltas[1 + len(FLOATS) : narrow_end, 3] = edits, params.has_penalties, 0
    deltas[narrow_end:, 3] = np.array(wide, np.int64).view(np.int32)
    return deltas


def wide_deltas(row: int, name: str, value: int) -> list[tuple[int, int, int, int]]:
    """Return the two deltas that set a 64-bit column of a row."""
    lower, upper = np.array([value], np.int64).view(np.int32).tolist()
    at = 2 * WIDE_COLUMNS.index(name)
    return [(WIDE, row, at, lower), (WIDE, row, at + 1, upper)]


def edits_delta(row: int) -> tuple[int, int, int, int]:
    """Return the delta that assigns the row an index among edits."""
    return NARROW, row, NARROW_COLUMNS.index("edits"), row
