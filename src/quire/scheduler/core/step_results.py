"""Results of steps: pending tokens become known, and some sequences end.

Usually each sampling row still belongs to the sequence for which it was planned, so this is array
arithmetic. A changed epoch shows that the row's sequence was preempted or ended meanwhile.
"""

from collections.abc import Collection, Iterable

import numpy as np

from quire.base.events import Stepped
from quire.base.plan import RowDraft, StepResult
from quire.base.step_outputs import Finish
from quire.scheduler.core.extension import DraftTokens, Forking
from quire.scheduler.core.failures import Failures
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int32, Int64, Sequence, State
from quire.scheduler.decisions import OutputsBuilder
from quire.scheduler.extra_outputs import take_candidates, take_extras


class StepResults:
    """Application of step results to rows, memory and states of sequences."""

    def __init__(
        self,
        rows: Rows,
        memory: Memory,
        lifecycle: Lifecycle,
        branching: Forking,
        drafts: DraftTokens,
        failures: Failures,
    ) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._branching, self._drafts, self._failures = branching, drafts, failures

    def take(
        self, step: InFlightStep, later: Iterable[InFlightStep], result: StepResult, now: float
    ) -> OutputsBuilder:
        """Apply the result of the oldest step. Return the outputs for clients. later: the other
        steps in flight."""
        assert result.step_id == step.plan.step_id, "results must come in the order of plans"
        table, rows = self._rows.table, step.plan.sample_rows.astype(np.int64)
        outputs = OutputsBuilder()
        _name_rows(step, outputs)
        if result.row_errors or result.lost_swaps or result.error is not None:
            self._failures.take([step, *later], result, outputs, now)
        elif self._lifecycle.suspects.until:
            self._lifecycle.suspects.acquit(step)
        if result.prompt_candidates or result.pooled or result.token_values:
            take_extras(step, result, outputs)
        token_ids, epochs, sequences = result.token_ids[:, 0], step.epochs, step.sequences
        extra = {}  # accepted draft tokens by row
        if step.plan.drafts:
            extra = self._drafts.accepted(step, result, outputs)
        beams = rows[:0]
        if self._lifecycle.searches:
            others = self._branching.take_candidates(step, result, outputs, now)
            beams, rows, token_ids = rows[~others], rows[others], token_ids[others]
            epochs, sequences = epochs[others], sequences[others]
        live = table.epoch[rows] == epochs
        got_token = rows
        given: list[int] = []  # number of tokens after the first, per row
        if np.count_nonzero(live) < len(rows):
            num_taken = np.ones(len(rows), np.int64)
            num_taken[~live] = [
                self._take_late(s, [int(t), *extra.get(r, ())], r in step.omitted, outputs, now)
                for s, t, r in zip(sequences[~live], token_ids[~live], rows[~live], strict=True)
            ]
            got_token, given = rows[num_taken > 0], (num_taken - 1)[num_taken > 1].tolist()
            rows, token_ids, sequences = rows[live], token_ids[live], sequences[live]
        outputs.set_tokens(rows, table.arrival[rows], token_ids)
        if len(beams):
            got_token = np.concatenate([got_token, beams])
        known = self._rows.take_tokens(rows, token_ids)
        for i in self._ending(rows, token_ids, known):
            self._end(sequences[i], int(token_ids[i]), outputs, now)
        if long_lists := self._lifecycle.long_stop_lists:  # the row holds only a part of each list
            for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
                if sequence in long_lists and sequence.stops_at(token_id):
                    self._end(sequence, token_id, outputs, now)
        if step.plan.drafts:
            given += self._drafts.settle(step, sequences, extra, outputs, self._end, now)
        num_tokens, drafts = step.plan.num_scheduled_tokens, step.plan.drafts
        of_drafts = _draft_counts(drafts, given) if drafts else ()
        stepped = Stepped(
            now, result.step_id, got_token, num_tokens, result.duration_s, *of_drafts
        )  # fmt: skip
        self._lifecycle.add_event(stepped, is_first=True)  # before the ends that it caused
        if result.candidates:
            take_candidates(step, result, outputs)
        return outputs

    # ---- tokens ------------------------------------------------------------------------------

    def _ending(self, rows: Int64, token_ids: Int32, known: Int64) -> list[int]:
        """Return the indices of the rows that end with their last known token. All arguments: [N];
        known: the numbers of known tokens."""
        table = self._rows.table
        ends = known >= table.limit[rows]
        is_stop = table.stop_ids.take(rows, 0) == token_ids[:, None]  # `[rows]` takes longer
        if np.count_nonzero(is_stop):
            ends |= is_stop.any(1) & (known >= table.min_known[rows])
        found: list[int] = ends.nonzero()[0].tolist()
        return found

    def _end(self, sequence: Sequence, token_id: int, outputs: OutputsBuilder, now: float) -> None:
        """End a sequence at its last known token: by stop token if it is one, else by length."""
        if sequence.stops_at(token_id):
            is_eos = token_id in sequence.request.eos_token_ids
            finish = Finish("stop", None if is_eos else token_id)
        else:
            finish = Finish("length")
        outputs.finish(sequence, finish)
        self._lifecycle.end(sequence, finish.reason, now)

    def _take_late(
        self,
        sequence: Sequence,
        token_ids: list[int],
        is_void: bool,
        outputs: OutputsBuilder,
        now: float,
    ) -> int:
        """Append tokens to a sequence that lost its row, unless it has ended or the tokens are
        void. Return the number of appended tokens. The sequence waits for them before it gets
        another row."""
        if sequence.state is State.ENDED or sequence.num_pending_lost == 0:
            return 0
        sequence.num_pending_lost -= 1
        if is_void:
            self._lifecycle.forget_swapped(sequence)
            return 0
        for num, token_id in enumerate(token_ids, 1):
            sequence.saved_tokens = np.append(sequence.saved_tokens, np.int32(token_id))
            outputs.update_of(sequence).token_ids.append(token_id)
            if sequence.is_over(token_id):
                self._end(sequence, token_id, outputs, now)
                return num
        return len(token_ids)


def _draft_counts(
    drafts: Collection[RowDraft], given: list[int]
) -> tuple[int, int, tuple[int, ...]]:
    """Return the numbers of drafts, of draft tokens, and of accepted tokens by place in the draft.
    given: numbers of accepted tokens of drafts, if any."""
    accepted_at = [sum(num > place for num in given) for place in range(max(given, default=0))]
    return len(drafts), sum(len(draft.token_ids) for draft in drafts), tuple(accepted_at)


def _name_rows(step: InFlightStep, outputs: OutputsBuilder) -> None:
    """Report the sequences of the rows that this plan started or forked."""
    plan = step.plan
    if not plan.started and not plan.forked:
        return
    named = [start.row for start in plan.started] + [fork.child for fork in plan.forked]
    holders = step.holders_of(named)
    for row in named:
        if row in holders and not holders[row].is_beam:
            outputs.name_row(row, holders[row])
