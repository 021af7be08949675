"""Guesses at what sequences go on with, tried beside their next token (T 4.4.4, C16).

A guess costs what a token of a prompt costs, and changes no answer: the row samples at each place
as it would anyway, and what it samples counts up to the first that is not the guess. Guesses take
what the plan leaves of budget, blocks and length; nobody gives way for them.

A row whose guesses the host has made is in no plan until their result is in: they follow known
tokens. A device that guesses has the last token before the host, and where the row goes on: there
plans follow each other. The host counts all guesses of plans in flight as if they were right, and
plans within that bound; each result takes back what was wrong.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quire.base.messages import Draft, Drafted
from quire.base.plan import RowDraft, StepResult
from quire.base.settings.speculation import most_guesses
from quire.scheduler.core.extension import EndAtToken
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import InFlightStep, PlanBuilder
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int32, RowTable, Sequence, State
from quire.scheduler.decisions import OutputsBuilder

Int64 = npt.NDArray[np.int64]
Worth = Callable[[RowTable, Int64], Int64]


class Drafts:
    """Keeps draft tokens until a plan verifies them, or they are out of date.

    drafted: by request id and index.
    """

    def __init__(self, rows: Rows, memory: Memory, lifecycle: Lifecycle) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self.drafted: dict[tuple[str, int], Draft] = {}
        self._on_device = False  # they are to be made there

    def take(self, message: Drafted) -> None:
        """Keep guesses, in the place of earlier ones of the same sequences."""
        found = {(draft.request_id, draft.index): draft for draft in message.drafts}
        is_alike = not (message.on_device or self._on_device)
        self.drafted = self.drafted | found if is_alike else found
        self._on_device = message.on_device

    def candidates(self, worth: Worth | None = None, num_pending: int | None = 0) -> list[Sequence]:
        """List the sequences whose next plan may try guesses: they run and lack only their next
        token. worth: picks those of their rows for which it is worth asking. num_pending: tokens of
        each that are on their way; those that have fewer or more are left out, but with None."""
        table, rows = self._rows.table, self._rows.running
        total = table.total[rows]
        may_try = (table.computed[rows] == total - 1) & (table.limit[rows] > total + 1)
        may_try &= ~table.is_held[rows]
        if num_pending is not None:
            may_try &= total == table.known[rows] + num_pending
        rows = rows[may_try]
        if worth is not None:
            rows = worth(table, rows)
        return [each for each in self._rows.sequences(rows) if self._may_ever_try(each)]

    def holders(self, rows: Int32) -> list[Sequence]:
        """List who holds these rows."""
        return self._rows.sequences(rows.astype(np.int64))

    def spread(self, builder: PlanBuilder, rows: Int32, num_tokens: Int32, budget: int) -> None:
        """Let rows of a plan try their guesses, as many as the budget has room for. rows,
        num_tokens: of the plan; what is tried is added to the latter."""
        place = {row: i for i, row in enumerate(rows.tolist())}
        if self._memory.kv.has_states:
            budget = min(budget, most_guesses(self._rows.table.num_rows))
        guessed, self.drafted = self.drafted, {}
        builder.is_guessing = on_device = self._on_device
        if not on_device and self._rows.is_any_unsure:
            return  # where some rows go on is not known here
        for key, draft in guessed.items():
            sequence = self._find(draft)
            if sequence is None:
                continue
            if not on_device and sequence.num_known_tokens != draft.num_known:
                continue
            at = place.get(sequence.row)
            if at is None:
                if not on_device:
                    self.drafted[key] = draft
                continue
            if num_tokens[at] != 1 or not self._may_try(sequence):
                continue
            total = int(self._rows.table.total[sequence.row])
            most = min(len(draft.token_ids), budget, sequence.limit - total - 1)
            num = self._make_room(sequence, most, builder)
            if num > 0:
                self._rows.try_tokens(sequence.row, num, is_held=not on_device)
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
            if draft.row not in step.left_out and sequence.state is not State.ENDED:
                outputs.update_of(sequence).num_guessed = len(draft.token_ids)
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
            num_tried = len(draft.token_ids)
            self._rows.end_try(draft.row, num_tried, num_tried - len(more))
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
        """Name the blocks that accepted drafts have filled: a passed state is kept by its name."""
        table, row, size = self._rows.table, sequence.row, self._memory.block_size
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        if num_tokens >= table.index_at[row]:
            count = num_tokens // size
            self._memory.name_full_blocks([sequence], [count])
            self._rows.set_index_at(np.array([row]), np.array([(count + 1) * size]))

    def _find(self, draft: Draft) -> Sequence | None:
        """Find the sequence of a draft, if it holds a row."""
        first = self._lifecycle.sequences.get(draft.request_id)
        members = [] if first is None else first.members
        found = next((member for member in members if member.index == draft.index), None)
        return None if found is None or found.row < 0 else found

    def _may_try(self, sequence: Sequence) -> bool:
        """Tell whether the plan computes a sequence's last token, and nothing else hangs on it: a
        group that is about to be forked, a beam, a prefix to be pinned, a prompt that is open, a
        logits processor, a step that failed. And that it is known, if the host has guessed."""
        table, row = self._rows.table, sequence.row
        if table.computed[row] != table.total[row]:
            return False
        if self._on_device:
            if table.is_masked[row] or self._memory.kv.has_states:
                return False  # masks, and states behind right guesses, are the host's matter
        elif table.total[row] != table.known[row]:
            return False
        return self._may_ever_try(sequence)

    def _may_ever_try(self, sequence: Sequence) -> bool:
        group = sequence.group
        if not sequence.samples or sequence.is_open or sequence.is_beam:
            return False
        if sequence.request.params.logits_processors:  # they may remember what they were asked
            return False
        if sequence in self._lifecycle.suspects.until:  # no guess is to be its fault
            return False
        if self._memory.kv.has_states and self._rows.num_stages > 1:
            return False  # which states are right is known on the last stage alone
        return group is None or group.is_forked

    def _make_room(self, sequence: Sequence, num: int, builder: PlanBuilder) -> int:
        """Return how many guesses have room: all, or those that the sequence's blocks hold."""
        row, capacity = sequence.row, int(self._rows.table.capacity[sequence.row])
        room = capacity - sequence.num_computed_tokens
        if num <= room:
            return num
        # Plans may follow in which each row needs a block, before these guesses are taken back.
        reserve = self._rows.num_running if self._on_device else 0
        appended = self._memory.grow_by_guesses(sequence, num, reserve)
        if appended is None:
            return room
        self._rows.set_capacity(row, sequence.blocks.capacity)
        builder.add_blocks(row, appended)
        return num
