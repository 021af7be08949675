"""The rows of a runner without torch, and what plans change of them.

The order of a plan is kept: rows started, then forked, then the rest, as `DeviceRows` does it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.messages import Request
from quire.base.plan import Plan, RowStart
from quire.ops.row_arrays import RowArrays
from quire.runner.columns import FLOATS, NARROW_COLUMNS, WIDE_COLUMNS
from quire.runner.plan_parts import Forks
from quire.runner.row_updates import RowUpdates
from quire.runner.sampling_flags import SamplingFlags, asks_for_edits

Column = npt.NDArray[Any]


class WarmRows:
    """started: how each row samples that a sequence has. flags: what the rows' sampling needs."""

    def __init__(self, num_rows: int, length: int, num_groups: int, block_size: int) -> None:
        num_blocks = -(-length // block_size) + 1
        narrow_CR = np.zeros((len(NARROW_COLUMNS), num_rows), np.int32)
        narrow_CR[NARROW_COLUMNS.index("edits")] = -1
        self.arrays = RowArrays(
            np.zeros((num_rows, length), np.int32),
            np.zeros(num_rows, np.int64),
            np.zeros((num_groups, num_rows, num_blocks), np.int32),
            narrow_CR,
            np.zeros((len(WIDE_COLUMNS), num_rows), np.int64),
            block_size,
        )
        self.flags = SamplingFlags.of_rows(num_rows)
        self.started: dict[int, RowStart] = {}
        self._forks = Forks()

    def take(self, plan: Plan) -> None:
        """Take what a plan changes of the rows before its step."""
        for row in plan.released.tolist():
            self.started.pop(row, None)
        updates = RowUpdates()
        for start in plan.started:
            self.flags.start(start)
            self.started[start.row] = start
            updates.add_start(start)
        if plan.forked:
            self._write(updates)
            updates = self._fork(plan)
        updates.add_plan(plan)
        self._write(updates)

    def column(self, name: str) -> Column:
        """Return a column of all rows, float32 or int64."""
        if name in WIDE_COLUMNS:
            wide: Column = self.arrays.wide_CR[WIDE_COLUMNS.index(name)]
            return wide
        column: Column = self.arrays.narrow_CR[NARROW_COLUMNS.index(name)]
        return column.view(np.float32) if name in FLOATS else column

    def _fork(self, plan: Plan) -> RowUpdates:
        for fork in self._forks.to_do(plan):
            self.arrays.copy_row(fork.parent, fork.child)
            self._forks.did(fork)
        updates = RowUpdates()
        for fork in plan.forked:
            self.flags.copy(fork.parent, fork.child)
            self.started[fork.child] = replace(self.started[fork.parent], row=fork.child)
            updates.add_fork(fork)
        return updates

    def _write(self, updates: RowUpdates) -> None:
        for row, position, token_ids in updates.runs:
            self.arrays.write_tokens(row, position, token_ids)
        deltas = updates.merged_deltas()
        if len(deltas):
            self.arrays.write_deltas(deltas)


def is_plain(plan: Plan) -> bool:
    """Tell whether a plan asks for nothing but tokens, chosen by temperature and filters, of rows
    that all did so when they started."""
    if plan.drafts or plan.is_guessing or len(plan.masked_rows) or len(plan.last_ids):
        return False
    if any(move.kind != "copy" for move in plan.moves):
        return False
    asks = bool((plan.num_candidates >= 0).any())
    return not asks and all(map(_is_plain_row, plan.started))


def is_plain_request(request: Request) -> bool:
    """Tell whether plans for a request alone are plain."""
    start = RowStart(
        row=0,
        token_ids=np.empty(0, np.int32),
        num_computed_tokens=0,
        num_prompt_tokens=0,
        params=request.params,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
    )
    return not request.grammar and _is_plain_row(start)


def _is_plain_row(start: RowStart) -> bool:
    params = start.params
    is_told = params.logprobs is not None or params.prompt_logprobs is not None
    is_more = params.has_penalties or params.has_dry or params.has_xtc or params.use_beam_search
    has_own = bool(params.logits_processors or params.logprob_token_ids)
    return not (is_told or is_more or has_own or asks_for_edits(start))
