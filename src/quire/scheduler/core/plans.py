"""Plans being made, and the record of a plan until its result is in."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.base.plan import BlockWrites, Move, MoveKind, Plan, Record, RowDraft, RowFork, RowStart
from quire.kv.host_tier import Copies
from quire.kv.manager import SequenceBlocks
from quire.kv.table import Appended
from quire.scheduler.core.sequence import Int32, Int64, RowTable, Sequence

Blocks = Seq[Seq[int]]  # block numbers by cache group
RowLease = tuple[int, int]  # a row and its epoch, which identify one owner of the row
NO_ROWS: Int64 = np.empty(0, np.int64)
NO_WRITES = BlockWrites()


@dataclass(slots=True)
class SharedBlocks:
    """Blocks that a row has in common with others. found: blocks from the index, from its parent,
    or from host memory. named: blocks that this plan enters in the index for the row."""

    row: int
    found: Blocks
    named: Blocks


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Record of a plan until its result is in.

    row_epochs, row_sequences: epochs and sequences of plan.rows, plan.new_forks and plan.idle_rows,
    in this order, as planned. epochs, sequences: the same of plan.sample_rows. shared: in the order
    of planning. omitted: rows whose results are void, because an earlier result ended or preempted
    their sequences.
    """

    plan: Plan
    row_epochs: Int64
    row_sequences: npt.NDArray[np.object_]
    epochs: Int64
    sequences: npt.NDArray[np.object_]
    shared: list[SharedBlocks]
    omitted: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, plan: Plan, table: RowTable, shared: list[SharedBlocks]) -> Self:
        """Return the record of a new plan."""
        leased, samples = _leased(plan), plan.sample_rows.astype(np.int64)
        rows = samples if leased is plan.sample_rows else leased.astype(np.int64)
        epochs, sequences = table.epoch[rows], table.sequences[rows]
        if rows is samples:  # as usual, all rows sample
            return cls(plan, epochs, sequences, epochs, sequences, shared)
        return cls(plan, epochs, sequences, table.epoch[samples], table.sequences[samples], shared)

    @property
    def leases(self) -> list[RowLease]:
        """Leases of the rows of row_epochs. (Forked beams are among plan.rows, or compute nothing
        yet.)"""
        return list(zip(_leased(self.plan).tolist(), self.row_epochs.tolist(), strict=True))

    @property
    def holders(self) -> dict[int, Sequence]:
        """Sequences of row_sequences, by row."""
        return dict(zip(_leased(self.plan).tolist(), self.row_sequences.tolist(), strict=True))

    def holders_of(self, rows: list[int]) -> dict[int, Sequence]:
        """Return the sequences of `holders` that hold one of these rows."""
        leased, last = _leased(self.plan), self.row_sequences[-len(rows) :]
        if leased[-len(rows) :].tolist() == rows:  # as usual, the rows that began with the plan
            return dict(zip(rows, last.tolist(), strict=True))
        [at] = np.isin(leased, np.array(rows, np.int32)).nonzero()
        return dict(zip(leased[at].tolist(), self.row_sequences[at].tolist(), strict=True))

    @property
    def sampling(self) -> dict[int, Sequence]:
        """Sequences of the sampling rows, by row."""
        return dict(zip(self.plan.sample_rows.tolist(), self.sequences, strict=True))

    def omit_rows(self, leases: Collection[RowLease]) -> None:
        """Make the results of these leases void, and of rows forked from them."""
        rows = {lease[0] for lease in self.leases if lease in leases}
        children = {fork.child for fork in self.plan.new_forks if fork.parent in rows}
        self.omitted.update(rows | children)


def _leased(plan: Plan) -> Int32:
    more = [fork.child for fork in plan.new_forks] + plan.idle_rows
    return np.concatenate([plan.rows, np.array(more, np.int32)]) if more else plan.rows


@dataclass(slots=True)
class Decoding:
    """Record of a plan in which each running row decodes one token. While these rows run, the next
    plan differs only in counters and blocks.

    rows, ones: int64 [N], the rows and their numbers of tokens. charges: int64 [S], what
    a plan charges the tenants of the first S slots. num_left: plans until a row reaches its limit.
    """

    step: InFlightStep
    rows: Int64
    ones: Int64
    charges: Int64
    num_left: int


class PlanBuilder(Record):
    """Plan being made: lists that grow, and are frozen into arrays at the end.

    writes: (cache group, row, index, block). copies: (cache group, row, from, to). swaps: moves
    between device and host. shared: as in `InFlightStep`. deferred: running prompts, by rank.
    extras: plan fields that features fill. claims: resources that a `ChunkLimit` has promised.
    """

    step_id: int
    rows: list[Int64] = []
    num_tokens: list[Int64] = []
    admitted: list[tuple[int, int]] = []  # rows and their numbers of tokens
    started: list[RowStart] = []
    forked: list[RowFork] = []
    writes: list[tuple[int, int, int, int]] = []
    copies: list[tuple[int, int, int, int]] = []
    swaps: list[Move] = []
    shared: list[SharedBlocks] = []
    drafts: list[RowDraft] = []
    is_guessing: bool = False
    has_preempted: bool = False
    deferred: list[Sequence] = []
    extras: dict[str, Any] = {}
    claims: dict[bytes, tuple[int, int]] = {}

    def add_rows(self, rows: Int64, num_tokens: Int64) -> None:
        self.rows.append(rows)
        self.num_tokens.append(num_tokens)

    def add_row(self, row: int, num_tokens: int) -> None:
        """Add an admitted row. These rows come after all others."""
        self.admitted.append((row, num_tokens))

    def add_blocks(self, row: int, appended: tuple[Appended, ...]) -> None:
        """Add the block-table entries and block copies of an allocation for a row."""
        for g, done in enumerate(appended):
            self.writes += [(g, row, index, block_id) for index, block_id in done.writes]
            if done.copies:
                self.copies += [(g, row, source, to) for source, to in done.copies]

    def add_fork(self, fork: RowFork, blocks: SequenceBlocks) -> None:
        """Add a row that begins as a copy of its parent. Its writes repeat this plan's writes to
        the parent."""
        self.forked.append(fork)
        parent, child = fork.parent, fork.child
        self.writes += [(g, child, i, b) for g, row, i, b in self.writes if row == parent]
        found = [table.live_blocks for table in blocks.tables]
        self.shared.append(SharedBlocks(fork.child, found, [[] for _ in found]))

    def add_moves(self, kind: MoveKind, copies: Seq[Copies]) -> None:
        """Add copies between device and host, listed by cache group."""
        for g, (source, destination) in enumerate(copies):
            if source:
                arrays = np.asarray(source, np.int32), np.asarray(destination, np.int32)
                self.swaps.append(Move(kind, g, *arrays))

    def add_table(self, sequence: Sequence, num_blocks: int | None = None) -> None:
        """Add all block-table entries of a row, or only the first num_blocks of them."""
        for g, table in enumerate(sequence.blocks.tables):
            row, first, blocks = sequence.row, table.num_dropped, table.blocks[:num_blocks]
            self.writes += [(g, row, i, b) for i, b in enumerate(blocks[first:], first)]

    def drop_rows(self, rows: set[int]) -> None:
        """Drop the writes and copies of preempted rows, since their blocks may go to other rows."""
        self.writes = [write for write in self.writes if write[1] not in rows]
        self.copies = [copy for copy in self.copies if copy[1] not in rows]
        self.shared = [held for held in self.shared if held.row not in rows]

    def block_writes(self) -> BlockWrites:
        if not self.writes:
            return NO_WRITES
        # A long prompt has thousands of these tuples. `np.asarray` takes three times as long.
        flat = np.fromiter(chain.from_iterable(self.writes), np.int32, 4 * len(self.writes))
        return BlockWrites(*flat.reshape(-1, 4).T.copy())

    def moves(self) -> tuple[Move, ...]:
        """Return the plan's moves: swaps out, then loads, then one block copy per cache group."""
        if not self.swaps and not self.copies:
            return ()
        swaps = tuple(sorted(self.swaps, key=lambda move: move.kind is not MoveKind.SWAP_OUT))
        if not self.copies:
            return swaps
        groups, _, source, destination = np.asarray(self.copies, np.int32).T.copy()
        return swaps + tuple(
            Move(MoveKind.COPY, g, source[groups == g], destination[groups == g])
            for g in np.unique(groups).tolist()
        )

    def all_rows(self) -> tuple[Int64, Int64]:
        """Return the scheduled rows and their numbers of tokens, both int64 [num_rows]."""
        if len(self.rows) == 1 and not self.admitted:
            return self.rows[0], self.num_tokens[0]
        rows, num_tokens = zip(*self.admitted, strict=True) if self.admitted else ((), ())
        last, num_last = np.array(rows, np.int64), np.array(num_tokens, np.int64)
        return np.concatenate((*self.rows, last)), np.concatenate((*self.num_tokens, num_last))
