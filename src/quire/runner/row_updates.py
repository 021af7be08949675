"""What a plan changes of the rows: deltas, as `quire.ops.row_state` has them, and tokens."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan, RowFork, RowStart
from quire.ops.row_arrays import COMPUTED, last_writes
from quire.runner.columns import edits_delta, start_deltas, wide_deltas

Int32 = npt.NDArray[np.int32]


@dataclass
class RowUpdates:
    """Deltas [K, 4] and tokens of rows (row, position, tokens), in the order of the plan."""

    deltas: list[Int32] = field(default_factory=list)
    runs: list[tuple[int, int, Int32]] = field(default_factory=list)

    def add_start(self, start: RowStart, edits: int = -1) -> None:
        """Add what starts a row. edits: the row's place among edits, or -1."""
        self.deltas.append(start_deltas(start, edits))
        if len(start.token_ids):
            self.runs.append((start.row, 0, start.token_ids))

    def add_fork(self, fork: RowFork, *, has_edits: bool = False) -> None:
        """Add in what a forked child differs from its parent."""
        own = wide_deltas(fork.child, "sample_index", fork.sample_index)
        if has_edits:
            own.append(edits_delta(fork.child))
        self.deltas.append(np.array(own, np.int32))

    def add_plan(self, plan: Plan) -> None:
        """Add what comes after rows have started and were forked."""
        for row, num_tokens in plan.truncated:
            self.deltas.append(np.array([(COMPUTED, row, 0, num_tokens)], np.int32))
        for host in plan.host_tokens:
            self.runs.append((host.row, host.position, host.token_ids))
            if host.is_prompt:
                end = host.position + len(host.token_ids)
                deltas = wide_deltas(host.row, "num_prompt_tokens", end)
                self.deltas.append(np.array(deltas, np.int32))
        if len(plan.last_ids):
            self._add_places(plan)
        writes = plan.block_writes
        if len(writes.row):
            columns = (writes.group, writes.row, writes.index, writes.block_id)
            self.deltas.append(np.stack(columns, axis=1))

    def _add_places(self, plan: Plan) -> None:
        """Add where rows of a model in stages are, and the last token that each computes."""
        deltas = np.zeros((len(plan.rows), 4), np.int32)
        deltas[:, 0], deltas[:, 1], deltas[:, 3] = COMPUTED, plan.rows, plan.computed_bound
        self.deltas.append(deltas)
        rows, positions = plan.rows.tolist(), plan.last_positions.tolist()
        tokens = np.split(plan.last_ids, len(rows))
        self.runs += zip(rows, positions, tokens, strict=True)

    def merged_deltas(self) -> Int32:
        """Merge all deltas: of several for one place the last."""
        if not self.deltas:
            return np.empty((0, 4), np.int32)
        merged = np.concatenate(self.deltas)
        if len(merged) == 1:
            return merged
        wide = merged.astype(np.int64)
        places = ((wide[:, 0] + 8) << 56) + (wide[:, 1] << 31) + wide[:, 2]
        kept: Int32 = merged[last_writes(places)]
        return kept
