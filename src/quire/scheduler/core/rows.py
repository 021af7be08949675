"""Rows: their sequences, their running order, and all their numbers.

Only this file assigns columns of `RowTable`. Other files read them.
"""

from dataclasses import dataclass, field

import numpy as np

from quire.base.plan import HostTokens, RowFork, RowStart
from quire.scheduler.core.sequence import NEVER, NUM_STOP_IDS, Int32, Int64, RowTable, Sequence

FORKED_COLUMNS = (
    "computed", "total", "known", "limit", "capacity", "index_at", "min_known", "num_open",
    "num_candidates", "stop_ids", "is_masked", "samples",
)  # fmt: skip


@dataclass(slots=True)
class RowChanges:
    """Row changes for the next plan: released rows, forked beams, and known tokens that the host
    sends for beams and grown prompts."""

    released: list[int] = field(default_factory=list)
    forks: list[RowFork] = field(default_factory=list)
    host_tokens: list[HostTokens] = field(default_factory=list)


class Rows:
    """Row table, running order, and changes since the last plan.

    free: a stack; the last one is taken first. max_prefill: maximum tokens of a row in one step; 0
    for no limit. num_stages: pipeline stages of the model. With several, a row is planned only once
    the host knows its last token and can send it to the first stage.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, max_prefill: int = 0, num_stages: int = 1
    ) -> None:
        self.table = RowTable(num_rows, max_model_len)
        self._in_order: Int64 = np.empty(0, np.int64)  # running rows, without these changes
        self._joined, self._left = list[int](), list[int]()
        self.changes = RowChanges()
        self.free = list(range(num_rows - 1, -1, -1))
        self.num_trying = 0  # rows with drafts in flight
        self._max_prefill = max_prefill or NEVER
        self.num_stages = num_stages

    # ---- questions ---------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_running(self) -> int:
        return len(self._in_order) + len(self._joined) - len(self._left)

    @property
    def running(self) -> Int64:
        """Running rows by priority, then arrival, int64 [N]."""
        self.update_order()
        return self._in_order

    @property
    def last_running(self) -> Sequence:
        """The running sequence to preempt first."""
        found: Sequence = self.table.sequences[self.running[-1]]
        return found

    def sequences(self, rows: Int64 | None = None) -> list[Sequence]:
        """Return the sequences of these rows, or of all running rows."""
        found: list[Sequence] = self.table.sequences[
            self.running if rows is None else rows
        ].tolist()
        return found

    def needs(self, rows: Int64) -> Int64:
        """Return the number of tokens that each of these rows could compute now, int64 [N]."""
        table = self.table
        bound = np.minimum(table.total[rows] - table.num_open[rows], table.limit[rows] - 1)
        need: Int64 = np.minimum(bound - table.computed[rows], self._max_prefill)
        if self.num_trying:
            need[table.is_held[rows]] = 0
        if self.num_stages > 1:
            need[table.total[rows] > table.known[rows]] = 0
        return need

    def take_turns(self, needs: Int64) -> Int64:
        """Return the needs for the next plan, given the needs of all running rows, both int64 [N].
        With several stages, a plan gets only a share of the decoding rows, so that each stage has a
        plan to compute."""
        if self.num_stages == 1:
            return needs
        decoding = np.flatnonzero(needs == 1)
        bound = -(-self.num_running // self.num_stages)
        if len(decoding) > bound:
            needs = needs.copy()
            needs[decoding[bound:]] = 0
        return needs

    def last_ids(self, rows: Int64, positions: Int32) -> Int32:
        """Return one known token of each row, int32 [N], at these positions."""
        found: Int32 = self.table.tokens[rows, positions]
        return found

    def need_of(self, sequence: Sequence) -> int:
        return int(self.needs(np.array([sequence.row]))[0])

    def has_drafts_in_flight(self, sequence: Sequence) -> bool:
        """Return whether drafts of a running sequence are in flight."""
        return bool(self.table.verified[sequence.row])

    @property
    def is_any_unsure(self) -> bool:
        """Whether plannable rows have drafts in flight, so that the host knows only a bound of
        their length."""
        table = self.table
        return bool(self.num_trying and (table.verified[~table.is_held] > 0).any())

    def idle(self) -> Int64:
        """Return the rows of open prompts that have no tokens to compute now."""
        rows = self.running[self.table.num_open[self.running] > 0]
        found: Int64 = rows[self.needs(rows) == 0]
        return found

    # ---- owners of rows ----------------------------------------------------------------------

    def start(self, sequence: Sequence, num_computed: int, is_indexed: bool) -> RowStart:
        """Give a sequence a row, and reserve rows for the missing members of its group. Return the
        row's start for the plan. is_indexed: whether its full blocks enter the index."""
        table, request, params = self.table, sequence.request, sequence.params
        if self._left:
            self.update_order()  # since the row may have left
        row = sequence.row = self.free.pop()
        known = sequence.saved_tokens
        table.tokens[row, : len(known)] = known
        table.computed[row] = num_computed
        table.total[row] = table.known[row] = len(known)
        table.limit[row] = sequence.limit
        table.num_open[row] = sequence.is_open
        table.capacity[row] = sequence.blocks.capacity
        table.index_at[row] = 0 if is_indexed else NEVER
        table.min_known[row] = sequence.num_prompt_tokens + params.min_tokens
        table.num_candidates[row] = -1 if params.logprobs is None else params.logprobs
        table.is_masked[row] = bool(request.grammar)
        table.samples[row] = sequence.samples
        table.stop_ids[row] = -1
        if stop_ids := request.stop_token_ids[:NUM_STOP_IDS]:
            table.stop_ids[row, : len(stop_ids)] = stop_ids
        self.hand_to(sequence)
        self._joined.append(row)
        group = sequence.group
        if group is not None and not group.is_forked:
            for _ in range(group.num_members - 1):
                group.reserved_rows.append(self.free.pop())
        return RowStart(
            row=row,
            token_ids=known,
            num_computed_tokens=num_computed,
            num_prompt_tokens=sequence.num_prompt_tokens,
            params=params,
            seed=request.seed,
            sample_index=sequence.index,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            adapter_id=request.adapter_id,
            media=request.spans if request.media else (),
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Copy the parent's row to the child's row. Both share their blocks."""
        table = self.table
        for name in FORKED_COLUMNS:
            column = getattr(table, name)
            column[child.row] = column[parent.row]
        known = table.known[parent.row]
        table.tokens[child.row, :known] = table.tokens[parent.row, :known]
        self.share(np.array([parent.row, child.row]))

    def hand_to(self, sequence: Sequence) -> None:
        """Record the sequence that owns a row."""
        table, row = self.table, sequence.row
        table.sequences[row] = sequence
        table.arrival[row], table.priority[row] = sequence.arrival, sequence.priority
        table.tenant[row] = sequence.tenant

    def run(self, rows: list[int]) -> None:
        """Add rows with recorded sequences to the running rows."""
        self._in_order = self._sorted(np.concatenate([self.running, np.asarray(rows, np.int64)]))

    def set_priority(self, rows: list[int], priority: int) -> None:
        """Change the priority of running rows."""
        self.table.priority[rows] = priority
        self._in_order = self._sorted(self.running)

    def update_order(self) -> None:
        """Sort in the rows that have joined, and remove the rows that have left. One update serves
        all rows of a step."""
        if not (self._joined or self._left):
            return
        table, running = self.table, self._in_order
        if self._joined:
            running = np.concatenate((running, np.array(self._joined)))
            last = running[-1 - len(self._joined) :]
            ranks = [*zip(table.priority[last].tolist(), table.arrival[last].tolist(), strict=True)]
            if ranks != sorted(ranks):
                running = self._sorted(running)
        if self._left:
            has_left = np.zeros(table.num_rows, bool)
            has_left[self._left] = True
            running = running[~has_left[running]]
        self._in_order, self._joined, self._left = running, [], []

    def _sorted(self, running: Int64) -> Int64:
        return running[np.lexsort((self.table.arrival[running], self.table.priority[running]))]

    def release(self, sequence: Sequence) -> None:
        """Release the row of a sequence. The sequence keeps its known tokens, and its pending
        tokens still arrive."""
        row, table = sequence.row, self.table
        known, verified = table.known.item(row), table.verified.item(row)
        sequence.num_pending_lost = table.total.item(row) - known - verified
        if verified:
            self._forget_drafts(row)
        sequence.saved_tokens = table.tokens[row, :known].copy()
        sequence.row = -1
        table.sequences[row] = None
        table.epoch[row] += 1
        self._left.append(row)
        self.free.append(row)
        changes = self.changes
        changes.released.append(row)
        if changes.forks or changes.host_tokens:
            changes.forks = [fork for fork in changes.forks if fork.child != row]
            changes.host_tokens = [item for item in changes.host_tokens if item.row != row]

    def give_back(self, rows: list[int]) -> None:
        """Free reserved rows."""
        self.free += rows

    def take_changes(self) -> RowChanges:
        """Return the changes for the next plan, and clear them."""
        changes, self.changes = self.changes, RowChanges()
        return changes

    # ---- blocks ------------------------------------------------------------------------------

    def set_capacity(self, rows: Int64 | int, num_tokens: Int64 | int) -> None:
        """Set the number of tokens that the blocks of these rows hold."""
        self.table.capacity[rows] = num_tokens

    def share(self, rows: Int64 | int) -> None:
        """Note that the last blocks of these rows are shared, so that the next write asks
        `Memory`."""
        self.table.capacity[rows] = self.table.computed[rows]

    def set_index_at(self, rows: Int64 | int, num_tokens: Int64 | int) -> None:
        """Set the length at which the next full block of each row enters the index."""
        self.table.index_at[rows] = num_tokens

    # ---- tokens ------------------------------------------------------------------------------

    def advance(self, rows: Int64 | int, computed: Int64 | int) -> None:
        """Set the number of computed tokens of these rows after the plan being made."""
        self.table.computed[rows] = computed

    def expect_tokens(self, rows: Int64) -> None:
        """Add a pending token to each of these sampling rows, which have computed all others."""
        self.table.total[rows] = self.table.computed[rows] + 1

    def take_tokens(self, rows: Int64, token_ids: Int32) -> Int64:
        """Make the oldest pending token of each row known. Return the known lengths. rows: int64
        [N], token_ids: int32 [N]."""
        table, known = self.table, self.table.known[rows]
        table.tokens[rows, known] = token_ids
        known = known + 1
        table.known[rows] = known
        return known

    def add_drafts(self, row: int, num_tokens: int, is_held: bool) -> None:
        """Add draft tokens after a row's tokens in the plan being made. is_held: the row is not
        planned again before this plan's result."""
        table = self.table
        self.num_trying += not table.verified[row]
        table.computed[row] += num_tokens
        table.total[row] += num_tokens
        table.verified[row] += num_tokens
        table.is_held[row] |= is_held

    def settle_drafts(self, row: int, num_tokens: int, num_rejected: int) -> None:
        """Take back the rejected drafts of a plan. Accepted drafts become pending tokens."""
        table = self.table
        table.computed[row] -= num_rejected
        table.total[row] -= num_rejected
        table.verified[row] -= num_tokens
        table.is_held[row] = False
        self.num_trying -= not table.verified[row]

    def _forget_drafts(self, row: int) -> None:
        self.num_trying -= 1
        self.table.verified[row] = 0
        self.table.is_held[row] = False

    def put_token(self, row: int, token_id: int) -> None:
        """Append a known token that the host chose to a row without pending tokens."""
        table, known = self.table, int(self.table.known[row])
        table.tokens[row, known] = token_id
        table.known[row] = table.total[row] = known + 1
        self.changes.host_tokens.append(HostTokens(row, known, np.array([token_id], np.int32)))

    def extend_prompt(self, sequence: Sequence, token_ids: Int32) -> None:
        """Append a piece to an open prompt, with or without a row. `limit` and `is_open` are
        already updated. token_ids: int32 [num_tokens]."""
        row, table = sequence.row, self.table
        if row < 0:
            sequence.saved_tokens = np.concatenate([sequence.saved_tokens, token_ids])
            return
        known = int(table.known[row])
        if len(token_ids):
            table.tokens[row, known : known + len(token_ids)] = token_ids
            self.changes.host_tokens.append(HostTokens(row, known, token_ids, is_prompt=True))
        table.known[row] = table.total[row] = known + len(token_ids)
        table.limit[row] = sequence.limit
        table.num_open[row] = sequence.is_open
        table.min_known[row] = sequence.num_prompt_tokens + sequence.params.min_tokens
