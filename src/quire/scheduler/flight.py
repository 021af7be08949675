"""Plans in the making and plans in flight."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.base.plan import BlockWrites, Move, Plan, RowStart
from quire.kv.table import Appended
from quire.scheduler.sequence import Int32, Int64, Sequence

Blocks = Seq[Seq[int]]  # by group
Line = tuple[int, int]  # a row and its epoch: one sequence's stay there


@dataclass(frozen=True, slots=True)
class Flight:
    """What the scheduler remembers of a plan until its result is in.

    row_epochs and row_sequences: of plan.rows when planned, and whose they were; epochs and
    sequences: the same of plan.sample_rows. shared: row, blocks that it found in the index and
    blocks that it entered there with this plan, in the order of planning. left_out: rows of
    sequences that an earlier plan's result ended or sent back; what this plan gives them is void.
    """

    plan: Plan
    row_epochs: Int64
    row_sequences: npt.NDArray[np.object_]
    epochs: Int64
    sequences: npt.NDArray[np.object_]
    shared: list[tuple[int, Blocks, Blocks]]
    left_out: set[int] = field(default_factory=set)

    @property
    def lines(self) -> list[Line]:
        """Of plan.rows."""
        return list(zip(self.plan.rows.tolist(), self.row_epochs.tolist(), strict=True))


@dataclass(slots=True)
class Draft:
    """A plan in the making: lists that grow, frozen into arrays at the end."""

    step_id: int
    rows: list[Int64] = field(default_factory=list)
    num_tokens: list[Int64] = field(default_factory=list)
    started: list[RowStart] = field(default_factory=list)
    writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    shared: list[tuple[int, Blocks, Blocks]] = field(default_factory=list)
    has_preempted: bool = False

    def add_rows(self, rows: Int64, num_tokens: Int64) -> None:
        self.rows.append(rows)
        self.num_tokens.append(num_tokens)

    def add_blocks(self, row: int, appended: tuple[Appended, ...]) -> None:
        """Block-table entries and copies that follow from room made for a row."""
        for group, done in enumerate(appended):
            for index, block_id in done.writes:
                self.writes.append((group, row, index, block_id))
            if done.copies:
                self.copies.setdefault(group, []).extend(done.copies)

    def add_adopted(self, sequence: Sequence, num_blocks: int) -> None:
        """Block-table entries of a prefix hit."""
        for group, table in enumerate(sequence.blocks.tables):
            for index in range(table.num_dropped, num_blocks):
                self.writes.append((group, sequence.row, index, table.blocks[index]))

    def block_writes(self) -> BlockWrites:
        if not self.writes:
            return BlockWrites()
        columns = np.asarray(self.writes, np.int32).T.copy()
        return BlockWrites(*columns)

    def moves(self) -> tuple[Move, ...]:
        moves = []
        for group, pairs in self.copies.items():
            source, destination = np.asarray(pairs, np.int32).T.copy()
            moves.append(Move("copy", group, source, destination))
        return tuple(moves)

    def all_rows(self) -> tuple[Int32, Int32]:
        """Scheduled rows and their token counts."""
        if not self.rows:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        rows = np.concatenate(self.rows).astype(np.int32)
        return rows, np.concatenate(self.num_tokens).astype(np.int32)
