"""Plans: while they are made, in flight until their results are in, and after a failure.

A step that fails is run again in parts, which finds the row that failed
(`engine/loop/recovery.py`). Where layers keep a state that is impossible: it is written in place,
so a second run would not begin with the one that the first began with. Then all rows of the step go
back to the last states that the index has of them, and are suspects: each is alone in its plans
until it has passed. One that fails alone is guilty; one that gets as far as in the step that failed
is planned with others again.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.base.plan import BlockWrites, Move, MoveKind, Plan, RowDraft, RowFork, RowStart
from quire.kv.host_tier import Copies
from quire.kv.manager import SequenceBlocks
from quire.kv.table import Appended
from quire.scheduler.core.sequence import Int32, Int64, Sequence, State

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


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: lists that grow, frozen into arrays at the end. swaps: moves out of the
    device's memory and back; shared: as in `InFlightStep`; deferred: prompts under way, by rank.
    extras: fields of the plan that features fill; claims: what a `ChunkLimit` has promised."""

    step_id: int
    rows: list[Int64] = field(default_factory=list)
    num_tokens: list[Int64] = field(default_factory=list)
    started: list[RowStart] = field(default_factory=list)
    forked: list[RowFork] = field(default_factory=list)
    writes: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int, int]] = field(
        default_factory=list
    )  # cache group, row, from, to
    swaps: list[Move] = field(default_factory=list)
    shared: list[SharedBlocks] = field(default_factory=list)
    drafts: list[RowDraft] = field(default_factory=list)
    is_guessing: bool = False
    has_preempted: bool = False
    deferred: list[Sequence] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    claims: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def add_rows(self, rows: Int64, num_tokens: Int64) -> None:
        self.rows.append(rows)
        self.num_tokens.append(num_tokens)

    def add_blocks(self, row: int, appended: tuple[Appended, ...]) -> None:
        """Add the block-table entries and copies that follow from room made for a row."""
        for g, done in enumerate(appended):
            for index, block_id in done.writes:
                self.writes.append((g, row, index, block_id))
            for source, destination in done.copies:
                self.copies.append((g, row, source, destination))

    def add_fork(self, fork: RowFork, blocks: SequenceBlocks) -> None:
        """Add a row that begins as a copy of its parent's: the parent's table on the device may
        lack what this plan writes into it."""
        self.forked.append(fork)
        parent, child = fork.parent, fork.child
        self.writes += [(g, child, i, b) for g, row, i, b in self.writes if row == parent]
        found = [table.live_blocks for table in blocks.tables]
        self.shared.append(SharedBlocks(fork.child, found, [[] for _ in found]))

    def add_moves(self, kind: MoveKind, copies: Seq[Copies]) -> None:
        """Add copies between the device and the host, by cache group."""
        for g, (source, destination) in enumerate(copies):
            if source:
                arrays = np.asarray(source, np.int32), np.asarray(destination, np.int32)
                self.swaps.append(Move(kind, g, *arrays))

    def add_table(self, sequence: Sequence, num_blocks: int | None = None) -> None:
        """Add the block-table entries of a row; num_blocks: of the first of them only."""
        for g, table in enumerate(sequence.blocks.tables):
            row, first, blocks = sequence.row, table.num_dropped, table.blocks[:num_blocks]
            self.writes += [(g, row, i, b) for i, b in enumerate(blocks[first:], first)]

    def drop_rows(self, rows: set[int]) -> None:
        """Forget what was planned for rows that are preempted: a copy must not go into a block
        that somebody else may get."""
        self.writes = [write for write in self.writes if write[1] not in rows]
        self.copies = [copy for copy in self.copies if copy[1] not in rows]
        self.shared = [held for held in self.shared if held.row not in rows]

    def block_writes(self) -> BlockWrites:
        if not self.writes:
            return BlockWrites()
        # Of tuples this is three times as fast as asarray: a long prompt has thousands.
        flat = np.fromiter(chain.from_iterable(self.writes), np.int32, 4 * len(self.writes))
        return BlockWrites(*flat.reshape(-1, 4).T.copy())

    def moves(self) -> tuple[Move, ...]:
        """Return the moves: what goes out, what comes in, then the step's copies, one per cache
        group."""
        swaps = tuple(sorted(self.swaps, key=lambda move: move.kind is not MoveKind.SWAP_OUT))
        if not self.copies:
            return swaps
        groups, _, source, destination = np.asarray(self.copies, np.int32).T.copy()
        return swaps + tuple(
            Move(MoveKind.COPY, g, source[groups == g], destination[groups == g])
            for g in np.unique(groups).tolist()
        )

    def all_rows(self) -> tuple[Int32, Int32]:
        """Return the scheduled rows and their token counts."""
        if not self.rows:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        rows = np.concatenate(self.rows).astype(np.int32)
        return rows, np.concatenate(self.num_tokens).astype(np.int32)


class Suspects:
    """until: by sequence, longest suspected first, how many tokens it has to compute to be none."""

    def __init__(self) -> None:
        self.until: dict[Sequence, int] = {}

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, which has ended."""
        self.until.pop(sequence, None)

    def suspect(self, step: InFlightStep) -> None:
        """Suspect all rows of a step that failed, also those that only begin with it."""
        lengths = _lengths(step)
        for lease, sequence in zip(step.leases, step.row_sequences, strict=True):
            if lease[0] not in step.left_out and sequence.state is not State.ENDED:
                self.until[sequence] = lengths.get(sequence, 1)

    def are_guilty(self, step: InFlightStep) -> bool:
        """Tell whether only rows of one request were in a step that failed, which was suspected."""
        found = list(_lengths(step))
        is_one = len({sequence.request.request_id for sequence in found}) == 1
        return is_one and all(sequence in self.until for sequence in found)

    def acquit(self, step: InFlightStep) -> None:
        """Take note of a step that did not fail."""
        for sequence, length in _lengths(step).items():
            if length >= self.until.get(sequence, length + 1):
                del self.until[sequence]


def _lengths(step: InFlightStep) -> dict[Sequence, int]:
    """Return who computed something in a step, and how many tokens they had computed then."""
    plan = step.plan.without_drafts
    ends = (plan.computed_bound + plan.num_tokens).tolist()
    rows = zip(plan.rows.tolist(), step.row_sequences, ends, strict=False)
    return {sequence: end for row, sequence, end in rows if row not in step.left_out}
