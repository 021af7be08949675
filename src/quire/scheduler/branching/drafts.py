"""Draft tokens, verified together with a sequence's next token (T 4.4.4, C16).

A draft token costs as much as a prompt token and changes no answer. The row samples at each
position as usual. Sampled tokens count up to and including the first one that differs from its
draft. Drafts only use budget, blocks and length that the plan has left; no row is preempted for
them.

If the host made the drafts of a row, the row is not planned again until their result is in, since
drafts follow known tokens. A drafter on the device knows the last token and the row's position
before the host does, so its plans can follow each other. The host counts all drafts in flight as
accepted and plans within that bound. Each result takes back the rejected ones.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.base.messages import Draft, Drafted
from quire.base.plan import RowDraft, StepResult
from quire.base.settings.speculation import max_draft_tokens
from quire.scheduler.core.extension import EndAtToken
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import InFlightStep, PlanBuilder
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int32, RowTable, Sequence, State
from quire.scheduler.decisions import OutputsBuilder

Int64 = npt.NDArray[np.int64]
RowFilter = Callable[[RowTable, Int64], Int64]


class Drafts:
    """Store of draft tokens until a plan verifies them, or they are out of date.

    drafted: by request id and index.
    """

    def __init__(self, rows: Rows, memory: Memory, lifecycle: Lifecycle) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self.drafted: dict[tuple[str, int], Draft] = {}
        self._on_device = False  # whether the drafter runs on the device

    def take(self, message: Drafted) -> None:
        """Store draft tokens. They replace earlier drafts of the same sequences."""
        found = {(draft.request_id, draft.index): draft for draft in message.drafts}
        are_host_drafts = not (message.on_device or self._on_device)
        self.drafted = self.drafted | found if are_host_drafts else found
        self._on_device = message.on_device

    def candidates(
        self, draftable: RowFilter | None = None, num_pending: int | None = 0
    ) -> list[Sequence]:
        """Return the running sequences whose next plan may verify drafts: they lack only their next
        token.

        draftable: selects the rows for which drafting pays off. num_pending: required number of
        pending tokens of each; None for any.
        """
        table, rows = self._rows.table, self._rows.running
        total = table.total[rows]
        may_verify = (table.computed[rows] == total - 1) & (table.limit[rows] > total + 1)
        may_verify &= ~table.is_held[rows]
        if num_pending is not None:
            may_verify &= total == table.known[rows] + num_pending
        rows = rows[may_verify]
        if draftable is not None:
            rows = draftable(table, rows)
        return [each for each in self._rows.sequences(rows) if self._may_ever_verify(each)]

    def holders(self, rows: Int32) -> list[Sequence]:
        """Return the sequences of these rows."""
        return self._rows.sequences(rows.astype(np.int64))

    def spread(self, builder: PlanBuilder, rows: Int64, num_tokens: Int64, budget: int) -> None:
        """Add drafts to rows of a plan, as far as the budget allows. rows, num_tokens: int64 [N],
        of the plan; the number of drafts is added to num_tokens."""
        index_of_row = {row: i for i, row in enumerate(rows.tolist())}
        if self._memory.kv.has_states:
            budget = min(budget, max_draft_tokens(self._rows.table.num_rows))
        proposed, self.drafted = self.drafted, {}
        builder.is_guessing = on_device = self._on_device
        if not on_device and self._rows.is_any_unsure:
            return  # the host does not know the length of some rows
        for key, draft in proposed.items():
            sequence = self._find(draft)
            if sequence is None:
                continue
            if not on_device and sequence.num_known_tokens != draft.num_known:
                continue
            at = index_of_row.get(sequence.row)
            if at is None:
                if not on_device:
                    self.drafted[key] = draft
                continue
            if num_tokens[at] != 1 or not self._may_verify(sequence):
                continue
            total = int(self._rows.table.total[sequence.row])
            max_drafts = min(len(draft.token_ids), budget, sequence.limit - total - 1)
            num = self._make_room(sequence, max_drafts, builder)
            if num > 0:
                self._rows.add_drafts(sequence.row, num, is_held=not on_device)
                token_ids = np.array(draft.token_ids[:num], np.int32)
                builder.drafts.append(RowDraft(sequence.row, token_ids))
                num_tokens[at] += num
                budget -= num
        builder.is_guessing &= len(builder.drafts) > 0

    def accepted(
        self, step: InFlightStep, result: StepResult, outputs: OutputsBuilder
    ) -> dict[int, list[int]]:
        """See DraftTokens."""
        sampling = step.sampling
        for draft in step.plan.drafts:
            sequence = sampling[draft.row]
            if draft.row not in step.omitted and sequence.state is not State.ENDED:
                outputs.update_of(sequence).num_draft_tokens = len(draft.token_ids)
        pairs = zip(sampling, result.num_accepted.tolist(), result.token_ids, strict=True)
        return {row: tokens[1:count].tolist() for row, count, tokens in pairs if count > 1}

    def settle(
        self,
        step: InFlightStep,
        sequences: npt.NDArray[np.object_],
        accepted: dict[int, list[int]],
        outputs: OutputsBuilder,
        end: EndAtToken,
        now: float,
    ) -> list[int]:
        """See DraftTokens."""
        holders, given = {sequence.row: sequence for sequence in sequences}, list[int]()
        for draft in step.plan.drafts:
            sequence = holders.get(draft.row)
            if sequence is None or sequence.row < 0:
                continue
            more = accepted.get(draft.row, [])
            num_drafts = len(draft.token_ids)
            self._rows.settle_drafts(draft.row, num_drafts, num_drafts - len(more))
            given.append(0)
            is_over = False
            for token_id in more:
                self._rows.take_tokens(np.array([draft.row]), np.array([token_id], np.int32))
                outputs.update_of(sequence).token_ids.append(token_id)
                given[-1] += 1
                if is_over := sequence.is_over(token_id):
                    break
            if self._memory.kv.has_states:
                self._name_passed(sequence)
            if is_over:
                end(sequence, token_id, outputs, now)
            elif self._memory.take_back(sequence):
                self._rows.set_capacity(draft.row, sequence.blocks.capacity)
        return given

    def _name_passed(self, sequence: Sequence) -> None:
        """Name the blocks that accepted drafts have filled. A state inside them is cached by its
        name."""
        table, row, size = self._rows.table, sequence.row, self._memory.block_size
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        if num_tokens >= table.index_at[row]:
            count = num_tokens // size
            self._memory.name_full_blocks([sequence], [count])
            self._rows.set_index_at(np.array([row]), np.array([(count + 1) * size]))

    def _find(self, draft: Draft) -> Sequence | None:
        """Return the sequence of a draft, if it has a row."""
        first = self._lifecycle.sequences.get(draft.request_id)
        members = [] if first is None else first.members
        found = next((member for member in members if member.index == draft.index), None)
        return None if found is None or found.row < 0 else found

    def _may_verify(self, sequence: Sequence) -> bool:
        """Return whether a row of the plan may verify drafts. The plan must compute its last token,
        which must be known unless the device drafts. A device drafter excludes masked rows and
        models with states."""
        table, row = self._rows.table, sequence.row
        if table.computed[row] != table.total[row]:
            return False
        if self._on_device:
            if table.is_masked[row] or self._memory.kv.has_states:
                return False  # only the host handles masks, and states of accepted drafts
        elif table.total[row] != table.known[row]:
            return False
        return self._may_ever_verify(sequence)

    def _may_ever_verify(self, sequence: Sequence) -> bool:
        # Exclude group leaders before a fork, beams, pins, open prompts and suspects.
        group = sequence.group
        if not sequence.samples or sequence.is_open or sequence.is_beam:
            return False
        if sequence.request.params.logits_processors:  # they may depend on call order
            return False
        if sequence in self._lifecycle.suspects.until:  # drafts must not cause the failure
            return False
        if self._memory.kv.has_states and self._rows.num_stages > 1:
            return False  # only the last stage knows which drafts are accepted
        return group is None or group.is_forked

    def _make_room(self, sequence: Sequence, num: int, builder: PlanBuilder) -> int:
        """Return how many of `num` drafts have room: all, or as many as fit into the sequence's
        blocks."""
        row, capacity = sequence.row, int(self._rows.table.capacity[sequence.row])
        room = capacity - sequence.num_computed_tokens
        if num <= room:
            return num
        # Later plans may need one block for each row before these drafts are taken back.
        reserve = self._rows.num_running if self._on_device else 0
        appended = self._memory.grow_by_drafts(sequence, num, reserve)
        if appended is None:
            return room
        self._rows.set_capacity(row, sequence.blocks.capacity)
        builder.add_blocks(row, appended)
        return num
