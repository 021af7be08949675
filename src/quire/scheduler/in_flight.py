"""Steps in flight: plans whose results are not in yet."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan
from quire.scheduler.sequence import Int64

Blocks = Seq[Seq[int]]  # by cache group
RowLease = tuple[int, int]  # a row and its epoch: one sequence's stay there


@dataclass(slots=True)
class SharedBlocks:
    """What ties a row to others. found: blocks that it found in the index, or that its parent held,
    or that came back from host memory; named: those that it entered in the index with this plan."""

    row: int
    found: Blocks
    named: Blocks


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """What the scheduler remembers of a plan until its result is in.

    row_epochs and row_sequences: of plan.rows when planned, then of the rows forked from them, then
    of plan.idle_rows, and whose they were; epochs and sequences: the same of plan.sample_rows.
    shared: in the order of planning.
    left_out: rows of sequences that an earlier plan's result ended or sent back; what this plan
    gives them is void.
    """

    plan: Plan
    row_epochs: Int64
    row_sequences: npt.NDArray[np.object_]
    epochs: Int64
    sequences: npt.NDArray[np.object_]
    shared: list[SharedBlocks]
    left_out: set[int] = field(default_factory=set)

    @property
    def leases(self) -> list[RowLease]:
        """List those of plan.rows, of the rows that sample as forks of them, and of those that only
        start. (Forked beams are among plan.rows, or compute nothing yet.)"""
        forked = [fork.child for fork in self.plan.new_forks]
        rows = self.plan.rows.tolist() + forked + self.plan.idle_rows
        return list(zip(rows, self.row_epochs.tolist(), strict=True))

    def leave_out(self, leases: Collection[RowLease]) -> None:
        """Make void what the plan gives these, and what is forked from them."""
        rows = {lease[0] for lease in self.leases if lease in leases}
        children = {fork.child for fork in self.plan.new_forks if fork.parent in rows}
        self.left_out.update(rows | children)
