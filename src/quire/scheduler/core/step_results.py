"""Taking the result of a step: pending tokens become known, and some sequences end.

The common case, every sampling row still belongs to the sequence that it was planned for, is array
arithmetic (`StepResults.take`). A sequence preempted or ended meanwhile is told apart by its row's
epoch.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.base.events import Stepped
from quire.base.plan import StepResult
from quire.base.step_outputs import Finish
from quire.scheduler.core.extension import Forking
from quire.scheduler.core.failures import Failures
from quire.scheduler.core.lifecycle import Lifecycle
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.plans import InFlightStep
from quire.scheduler.core.rows import Rows
from quire.scheduler.core.sequence import Int32, Sequence, State
from quire.scheduler.decisions import OutputsBuilder


class StepResults:
    """Applies results to rows, memory and lives of sequences."""

    def __init__(
        self,
        rows: Rows,
        memory: Memory,
        lifecycle: Lifecycle,
        branching: Forking,
        failures: Failures,
    ) -> None:
        self._rows, self._memory, self._lifecycle = rows, memory, lifecycle
        self._branching, self._failures = branching, failures

    def take(
        self, step: InFlightStep, later: Iterable[InFlightStep], result: StepResult, now: float
    ) -> OutputsBuilder:
        """Apply the result of the oldest step; returns what to tell the clients. later: the other
        steps in flight."""
        assert result.step_id == step.plan.step_id, "results must come in the order of plans"
        table, rows = self._rows.table, step.plan.sample_rows
        outputs = OutputsBuilder()
        _name_rows(step, outputs)
        if result.row_errors or result.lost_swaps or result.error is not None:
            self._failures.take([step, *later], result, outputs, now)
        elif self._lifecycle.suspects.until:
            self._lifecycle.suspects.acquit(step)
        _take_prompt_candidates(step, result, outputs)
        _hand_out_pooled(step, result, outputs)
        token_ids, epochs, sequences = result.token_ids[:, 0], step.epochs, step.sequences
        extra = _accepted(step, result)
        _tell_tries(step, outputs)
        beams = rows[:0]
        if self._lifecycle.searches:
            others = self._branching.take_candidates(step, result, outputs, now)
            beams, rows, token_ids = rows[~others], rows[others], token_ids[others]
            epochs, sequences = epochs[others], sequences[others]
        live = table.epoch[rows] == epochs
        got_token, given = rows, list[int]()  # tokens behind the first, by row
        if not live.all():
            num_taken = np.ones(len(rows), np.int64)
            num_taken[~live] = [
                self._take_late(s, [int(t), *extra.get(r, ())], r in step.left_out, outputs, now)
                for s, t, r in zip(sequences[~live], token_ids[~live], rows[~live], strict=True)
            ]
            got_token, given = rows[num_taken > 0], (num_taken - 1)[num_taken > 1].tolist()
            rows, token_ids, sequences = rows[live], token_ids[live], sequences[live]
        outputs.set_tokens(rows, table.arrival[rows], token_ids)
        if len(beams):
            got_token = np.concatenate([got_token, beams])
        known = self._rows.take_tokens(rows, token_ids)
        is_stop = (table.stop_ids[rows] == token_ids[:, None]).any(1)
        ends = (is_stop & (known >= table.min_known[rows])) | (known >= table.limit[rows])
        for i in np.flatnonzero(ends):
            self._end(sequences[i], int(token_ids[i]), outputs, now)
        self._check_long_stop_lists(sequences, token_ids, outputs, now)
        if step.plan.drafts:
            given += self._end_tries(step, sequences, extra, outputs, now)
        plan = step.plan
        stepped = Stepped(
            now, result.step_id, got_token, plan.num_scheduled_tokens, result.duration_s,
            len(plan.drafts), sum(len(draft.token_ids) for draft in plan.drafts),
            tuple(sum(num > place for num in given) for place in range(max(given, default=0))),
        )  # fmt: skip
        self._lifecycle.tell(stepped, is_first=True)  # before the endings that came with it
        _hand_out_candidates(step, result, outputs)
        return outputs

    # ---- tokens ------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, token_id: int, outputs: OutputsBuilder, now: float) -> None:
        """End a sequence by its last known token: as a stop token, or by length."""
        if sequence.stops_at(token_id):
            is_eos = token_id in sequence.request.eos_token_ids
            finish = Finish("stop", None if is_eos else token_id)
        else:
            finish = Finish("length")
        outputs.finish(sequence, finish)
        self._lifecycle.end(sequence, finish.reason, now)

    def _end_tries(
        self,
        step: InFlightStep,
        sequences: npt.NDArray[np.object_],
        extra: dict[int, list[int]],
        outputs: OutputsBuilder,
        now: float,
    ) -> list[int]:
        """Give the tokens behind the first to the rows that tried guesses and still go on, and take
        back the guesses that were wrong; returns how many tokens each of them got. sequences: those
        that hold their rows since."""
        holders, given = {sequence.row: sequence for sequence in sequences}, list[int]()
        for draft in step.plan.drafts:
            sequence = holders.get(draft.row)
            if sequence is None or sequence.row < 0:
                continue
            more = extra.get(draft.row, [])
            num_tried = len(draft.token_ids)
            self._rows.end_try(draft.row, num_tried, num_tried - len(more))
            given.append(0)
            is_over = False
            for token_id in more:
                self._rows.take_tokens(np.array([draft.row]), np.array([token_id], np.int32))
                outputs.update_of(sequence).token_ids.append(token_id)
                given[-1] += 1
                if is_over := self._is_over(sequence, token_id):
                    break
            if self._memory.kv.has_states:
                self._name_passed(sequence)
            if is_over:
                self._end(sequence, token_id, outputs, now)
            elif self._memory.take_back(sequence):
                self._rows.set_capacity(draft.row, sequence.blocks.capacity)
        return given

    def _name_passed(self, sequence: Sequence) -> None:
        """Name the blocks that right guesses have filled: states that were passed are kept by their
        names alone."""
        table, row, size = self._rows.table, sequence.row, self._memory.block_size
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        if num_tokens >= table.index_at[row]:
            count = num_tokens // size
            self._memory.name_full_blocks([sequence], [count])
            self._rows.set_index_at(np.array([row]), np.array([(count + 1) * size]))

    def _is_over(self, sequence: Sequence, token_id: int) -> bool:
        """Tell whether a sequence ends with the token that it has just got."""
        return sequence.stops_at(token_id) or sequence.num_known_tokens >= sequence.limit

    def _take_late(
        self,
        sequence: Sequence,
        token_ids: list[int],
        is_void: bool,
        outputs: OutputsBuilder,
        now: float,
    ) -> int:
        """Take tokens for a sequence that lost its row: kept if it was preempted, dropped if it
        ended or if they are void; returns how many it got. Until they came, it was not to get a row
        again."""
        if sequence.state is State.ENDED or sequence.num_pending_lost == 0:
            return 0
        sequence.num_pending_lost -= 1
        if is_void:
            self._lifecycle.forget_swapped(sequence)
            return 0
        for num, token_id in enumerate(token_ids, 1):
            sequence.saved_tokens = np.append(sequence.saved_tokens, np.int32(token_id))
            outputs.update_of(sequence).token_ids.append(token_id)
            if self._is_over(sequence, token_id):
                self._end(sequence, token_id, outputs, now)
                return num
        return len(token_ids)

    def _check_long_stop_lists(
        self,
        sequences: npt.NDArray[np.object_],
        token_ids: Int32,
        outputs: OutputsBuilder,
        now: float,
    ) -> None:
        """Check sequences with more stop ids than the row holds one by one."""
        long_lists = self._lifecycle.long_stop_lists
        if not long_lists:
            return
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            if sequence in long_lists and sequence.stops_at(int(token_id)):
                self._end(sequence, int(token_id), outputs, now)


def _name_rows(step: InFlightStep, outputs: OutputsBuilder) -> None:
    """Tell who is in the rows that were taken with this plan, before the first token there."""
    plan = step.plan
    if not plan.started and not plan.forked:
        return
    holders = {row: s for (row, _), s in zip(step.leases, step.row_sequences, strict=True)}
    taken = [start.row for start in plan.started] + [fork.child for fork in plan.forked]
    for row in taken:
        if row in holders and not holders[row].is_beam:
            outputs.name_row(row, holders[row])


def _take_prompt_candidates(
    step: InFlightStep, result: StepResult, outputs: OutputsBuilder
) -> None:
    """Hand out each prompt position's logprobs once, also if it was computed again, and also to a
    sequence that has lost its row meanwhile: it goes on behind what it has computed."""
    if not result.prompt_candidates:
        return
    for i, row in enumerate(step.plan.rows.tolist()):
        candidates = result.prompt_candidates.get(row)
        sequence = step.row_sequences[i]
        if candidates is None or row in step.left_out or sequence.state is State.ENDED:
            continue
        start = int(step.plan.computed_bound[i])
        fresh = candidates[max(0, sequence.num_prompt_logprobs - start) :]
        sequence.num_prompt_logprobs += len(fresh)
        sequence.found_at = -1  # it may find more now
        sequence.found_elsewhere = {}
        outputs.update_of(sequence).prompt_candidates = fresh


def _hand_out_candidates(step: InFlightStep, result: StepResult, outputs: OutputsBuilder) -> None:
    """Hand out the logprobs of sampled tokens, but not to beams, which choose from them."""
    if not result.candidates:
        return
    sampled = dict(zip(step.plan.sample_rows.tolist(), step.sequences, strict=True))
    for row, candidates in result.candidates.items():
        if row not in step.left_out and not sampled[row].is_beam:
            more = result.more_candidates.get(row, [])
            outputs.set_candidates(sampled[row], [candidates, *more])


def _hand_out_pooled(step: InFlightStep, result: StepResult, outputs: OutputsBuilder) -> None:
    """Hand out what prompts came to, with the token that stands for it; also to a sequence that has
    lost its row meanwhile, which ends with that token."""
    if not result.pooled:
        return
    sampled = dict(zip(step.plan.sample_rows.tolist(), step.sequences, strict=True))
    for row, pooled in result.pooled.items():
        sequence = sampled[row]
        if row not in step.left_out and sequence.state is not State.ENDED:
            outputs.update_of(sequence).pooled = pooled


def _tell_tries(step: InFlightStep, outputs: OutputsBuilder) -> None:
    """Tell who tried guesses, and how many."""
    if not step.plan.drafts:
        return
    sampled = dict(zip(step.plan.sample_rows.tolist(), step.sequences, strict=True))
    for draft in step.plan.drafts:
        sequence = sampled[draft.row]
        if draft.row not in step.left_out and sequence.state is not State.ENDED:
            outputs.update_of(sequence).num_guessed = len(draft.token_ids)


def _accepted(step: InFlightStep, result: StepResult) -> dict[int, list[int]]:
    """Return, by row, the tokens behind the first that rows got whose guesses were right."""
    if not step.plan.drafts:
        return {}
    rows, counts = step.plan.sample_rows.tolist(), result.num_accepted.tolist()
    pairs = zip(rows, counts, result.token_ids, strict=True)
    return {row: tokens[1:count].tolist() for row, count, tokens in pairs if count > 1}
