"""Plans in the making."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from quire.base.plan import BlockWrites, Move, MoveKind, RowDraft, RowFork, RowStart
from quire.kv.host_tier import Copies
from quire.kv.manager import SequenceBlocks
from quire.kv.table import Appended
from quire.scheduler.in_flight import SharedBlocks
from quire.scheduler.sequence import Int32, Int64, Sequence


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: lists that grow, frozen into arrays at the end. swaps: moves out of the
    device's memory and back; shared: as in `InFlightStep`; deferred: prompts under way, by rank."""

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
