"""Draft tokens from a model: what the draft model computes between two steps.

A drafter has keys and values of its own. They are in the sequences' blocks, which are shared,
evicted and restored like all others. The drafter computes a token after the step that computed it.
While drafting does not pay off, it lags in answers, so steps without draft tokens cost what they do
without a drafter. It computes every prompt, since other requests may share its blocks. It catches
up from the sequence's own tokens. A drafter that reads the target's hidden states cannot lag,
because they exist only until the next step. Tokens that the drafter has not computed, or that have
changed since, make drafts worse but no answer wrong.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.base.messages import Draft
from quire.base.plan import DraftAnswer, DraftOrder, Int32, Int64, Plan, StepResult
from quire.base.settings.speculation import MAX_DRAFT_TOKENS
from quire.engine.drafting.draft_pace import (
    UNLIMITED,
    Chance,
    PlannedDraft,
    StepTimes,
    lengths,
    planned_drafts,
)
from quire.engine.grammars.grammars import Grammars
from quire.scheduler.core.sequence import RowTable, Sequence, State

logger = logging.getLogger("quire")

SEQUENCES_PER_SWEEP = 64  # number of sequences added between two searches for ended ones
REST = 8  # steps in which decoding rows are skipped after drafting did not pay off


@dataclass(frozen=True)
class DrafterTraits:
    """Properties of a draft model that decide when and how much it drafts."""

    num_tokens: int  # maximum draft tokens of a row
    max_pass_tokens: int  # maximum tokens of one pass
    max_length: int  # maximum tokens of a sequence
    block_size: int  # tokens
    reads: bool  # whether it reads the target's hidden states
    may_lag: bool  # whether it may compute tokens of answers later


@dataclass(slots=True)
class _DraftState:
    """Drafting state of one sequence."""

    num_computed: int  # leading tokens that the drafter has computed
    chance: Chance = field(default_factory=Chance)
    verified: PlannedDraft | None = None  # draft tokens that the last plan with some verified
    is_lost: bool = False  # the drafter failed; the sequence gets no more draft tokens

    def catch_up(self, sequence: Sequence) -> None:
        """Record how many of the last verified draft tokens were accepted."""
        if self.verified is not None:
            num_right = self.verified.num_right(sequence.known_tokens)
            self.chance.observe(len(self.verified.token_ids), num_right)
            self.verified = None


class _Work(NamedTuple):
    """Tokens of a row that the drafter is to compute, and the number of tokens to draft."""

    sequence: Sequence
    draft_state: _DraftState
    row: int
    end: int  # position after the last token to compute
    read_from: int  # index of the first token among the last step's tokens
    num: int = 0  # draft tokens to propose

    @property
    def is_due(self) -> bool:
        return self.num > 0 or self.end > self.draft_state.num_computed


class ModelDrafting:
    """Drafter of a draft model for all sequences of an engine; it also proposes forced tokens.

    draft: executes an order on the device.
    holders: returns the sequences that hold the rows `[N]`."""

    num_idle = 0
    holds_back = True  # the last token must be known, and any row can have draft tokens
    drafts_on_device = decides_wait = may_skip = False

    def __init__(
        self,
        traits: DrafterTraits,
        grammars: Grammars,
        draft: Callable[[DraftOrder], DraftAnswer],
        holders: Callable[[Int32], list[Sequence]],
    ) -> None:
        self._traits, self._grammars, self._draft = traits, grammars, draft
        self._holders = holders
        self._of: dict[Sequence, _DraftState] = {}
        self._planned: dict[int, Sequence] = {}  # of the last plan, by row
        self._verifying: dict[int, _DraftState] = {}  # rows with draft tokens from the last call
        self._last: Plan | None = None  # last executed plan, until the drafter has seen it
        self._times, self._draft_times = StepTimes(), StepTimes()
        self._began_s, self.max_tokens = 0.0, UNLIMITED
        self._num_resting = 0  # steps left to skip

    def planned(self, plan: Plan) -> None:
        """Note a plan's sequences, their computed tokens, and the draft tokens that it verifies."""
        self._planned = dict(zip(plan.rows.tolist(), self._holders(plan.rows), strict=True))
        for start in plan.started:
            [sequence] = self._holders(np.array([start.row], np.int32))
            draft_state = self._draft_state(sequence, start.num_computed_tokens)
            draft_state.num_computed = min(draft_state.num_computed, start.num_computed_tokens)
        for row, verified in planned_drafts(plan).items():
            if (trying := self._verifying.get(row)) is not None:
                trying.verified = verified

    def skip_plans(self, num: int) -> None:
        """Do nothing: this drafter sees each plan, since it reads what the plan computes."""

    def draftable(self, table: RowTable, rows: Int64) -> Int64:
        """Return all `rows` [N]: a model can draft for each of them."""
        return rows

    def follow(self) -> None:
        """Do nothing: no plan follows one that is in flight."""

    def decide_wait(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """Do nothing: no other plan is in flight when a result arrives."""

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Keep an executed plan for the drafter, and record its time since drafting ended."""
        self._last = plan
        if len(plan.rows) and (plan.num_tokens - plan.num_drafts == 1).all():
            self._times.observe(plan.num_scheduled_tokens, time.perf_counter() - self._began_s)

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        forced = self._forced(sequences)
        if self._may_rest():
            self._began_s = time.perf_counter()
            return [_draft_of(sequence, token_ids) for sequence, token_ids in forced.items()]
        work = self._left_to_compute()
        others = [sequence for sequence in sequences if sequence not in forced]
        num_others = num_running - len(sequences) + sum(map(len, forced.values())) + len(forced)
        self._choose_lengths(others, num_others, work)
        drafts = [_draft_of(sequence, token_ids) for sequence, token_ids in forced.items()]
        drafts += self._carry_out(work)
        self._began_s = time.perf_counter()
        return drafts

    def _may_rest(self) -> bool:
        """Return whether to skip this step, and count it. It is skipped if drafting did not pay off
        lately, and no prompt was computed since."""
        plan = self._last
        if self._num_resting == 0 or plan is None or not self._traits.may_lag:
            return False
        self._num_resting -= 1
        if len(plan.rows) == 0 or plan.started or int(plan.num_tokens.max()) > 1:
            self._num_resting = 0
            return False
        return True

    def _forced(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Return the tokens that grammars force, by sequence; these need no model."""
        found = {}
        for sequence in sequences:
            max_drafts = min(MAX_DRAFT_TOKENS, sequence.limit - sequence.num_known_tokens - 1)
            if not sequence.request.grammar or max_drafts <= 0:
                continue
            if ids := self._grammars.forced(sequence, max_drafts):
                found[sequence] = ids
        return found

    def _carry_out(self, work: dict[Sequence, _Work]) -> list[Draft]:
        """Run the drafter if work is urgent, and return its draft tokens."""
        self._verifying = {each.row: each.draft_state for each in work.values() if each.num > 0}
        if not any(self._is_urgent(each) for each in work.values()):
            return []
        due = self._within_budget([each for each in work.values() if each.is_due])
        order = self._order(due)
        try:
            answer = self._draft(order)
        except Exception as error:
            logger.warning(
                "a draft model failed and stops drafting for %d sequences: %s: %s",
                len(due), type(error).__name__, error,
            )  # fmt: skip
            for each in due:
                each.draft_state.is_lost = True
            return []
        for each in due:
            each.draft_state.num_computed = max(each.draft_state.num_computed, each.end)
        max_drafts = int(order.num_draft_tokens.max())
        if max_drafts and order.num_tokens.max() <= 2 + self._traits.num_tokens:
            self._draft_times.observe(max_drafts, answer.duration_s)
        return self._drafts(due, answer)

    def _left_to_compute(self) -> dict[Sequence, _Work]:
        """Return, by sequence, the tokens of the last step that the drafter has not computed."""
        plan, self._last, found = self._last, None, dict[Sequence, _Work]()
        if plan is None:
            return found
        samples, traits = set(plan.sample_rows.tolist()), self._traits
        place = 0
        for row, first, num in zip(
            plan.rows.tolist(), plan.computed_bound.tolist(), plan.num_tokens.tolist(), strict=True
        ):
            begin, place = place, place + num
            sequence = self._planned.get(row)
            if sequence is None or not _is_still_there(sequence, row):
                continue
            known = sequence.num_known_tokens
            num_uncomputed = row in samples or traits.reads
            end = min(first + num, known - num_uncomputed, traits.max_length)
            draft_state = self._draft_state(sequence, first)
            if draft_state.is_lost:
                continue
            if traits.reads:
                draft_state.num_computed = max(draft_state.num_computed, first)
            read_from = begin + draft_state.num_computed - first
            found[sequence] = _Work(sequence, draft_state, row, end, read_from)
        return found

    def _choose_lengths(
        self, sequences: list[Sequence], num_others: int, work: dict[Sequence, _Work]
    ) -> None:
        """Choose how many tokens to draft for each of the sequences, and write that into `work`.
        num_others: tokens of the step that belong to other sequences."""
        traits, candidates = self._traits, list[tuple[_Work, int]]()
        for sequence in sequences:
            known, row, table = sequence.num_known_tokens, sequence.row, sequence.table
            each = work.get(sequence)
            if sequence not in self._of and sequence.members[0] in work:
                continue  # it was forked, and its first tokens are computed by its leader
            if each is None and not traits.reads:
                draft_state = self._draft_state(sequence, sequence.num_computed_tokens)
                each = _Work(sequence, draft_state, row, min(known - 1, traits.max_length), 0)
            if each is None or each.draft_state.is_lost:
                continue
            each.draft_state.catch_up(sequence)
            has_own_block = table.capacity[row] % traits.block_size == 0
            length = min(sequence.limit - 1, traits.max_length)
            max_drafts = min(traits.num_tokens, length - known)
            if has_own_block and max_drafts > 0 and each.end == known - 1:
                candidates.append((each, max_drafts))
        nums = lengths(
            [max_drafts for _, max_drafts in candidates],
            [each.draft_state.chance.value for each, _ in candidates],
            num_others + len(sequences) - len(candidates),
            self._times,
            lambda num: self._draft_times.seconds(num) or 0.0,
            max_tokens=self.max_tokens,
        )
        self._num_resting = 0 if any(nums) else REST - 1
        for (each, _), num in zip(candidates, nums, strict=True):
            if num == 0:
                each.draft_state.chance.hope(REST)
            work[each.sequence] = each._replace(num=num)

    def _is_urgent(self, work: _Work) -> bool:
        """Return whether work cannot wait: to draft, for a filled prompt block, or without lag."""
        size, begun = self._traits.block_size, work.draft_state.num_computed
        in_prompt = begun < work.sequence.num_prompt_tokens
        has_filled = in_prompt and work.end // size > begun // size
        may_lag = self._traits.may_lag and work.sequence.samples  # others fork its last block
        return work.num > 0 or has_filled or (work.end > begun and not may_lag)

    def _within_budget(self, due: list[_Work]) -> list[_Work]:
        """Return the work that fits into one pass; rows that lag furthest are cut or skipped."""
        room, found = self._traits.max_pass_tokens, list[_Work]()
        for each in sorted(due, key=lambda each: each.end - each.draft_state.num_computed):
            begun = each.draft_state.num_computed
            num_tokens = each.end - begun + (each.num > 0 and not self._traits.reads)
            if num_tokens > room:
                each = each._replace(end=min(each.end, begun + room), num=0)
            if each.is_due:
                found.append(each)
                room -= num_tokens
        return found

    def _order(self, due: list[_Work]) -> DraftOrder:
        proposed = np.array([each.num for each in due], np.int32)
        known = np.array([each.sequence.num_known_tokens for each in due], np.int32)
        first = np.array([each.draft_state.num_computed for each in due], np.int32)
        ends = np.array([each.end for each in due], np.int32)
        if not self._traits.reads:
            ends += proposed > 0  # the last known token, which no step has computed
        return DraftOrder(
            rows=np.array([each.row for each in due], np.int32),
            first=first,
            num_tokens=ends - first,
            num_known=known,
            num_draft_tokens=proposed,
            capacity=due[0].sequence.table.capacity[[each.row for each in due]].astype(np.int32),
            read_from=np.array([each.read_from for each in due], np.int32),
        )

    def _drafts(self, due: list[_Work], answer: DraftAnswer) -> list[Draft]:
        found = []
        for each, proposed in zip(due, answer.token_ids.tolist(), strict=True):
            sequence = each.sequence
            token_ids = proposed[: proposed.index(-1)] if -1 in proposed else proposed
            if token_ids and sequence.request.grammar:
                token_ids = self._grammars.cut(sequence, token_ids)
            if token_ids:
                found.append(_draft_of(sequence, token_ids))
        return found

    def _draft_state(self, sequence: Sequence, num_computed: int) -> _DraftState:
        """Return a sequence's state. A new one starts at `num_computed` or its leader's count."""
        found = self._of.get(sequence)
        if found is None:
            if len(self._of) >= SEQUENCES_PER_SWEEP and len(self._of) % SEQUENCES_PER_SWEEP == 0:
                alive = (item for item in self._of.items() if item[0].state is not State.ENDED)
                self._of = dict(alive)
            leader = self._of.get(sequence.members[0])
            begun = num_computed if leader is None else min(num_computed, leader.num_computed)
            found = self._of[sequence] = _DraftState(begun)
        return found


def _is_still_there(sequence: Sequence, row: int) -> bool:
    """Return whether a sequence's blocks still hold what the last step computed in `row`.

    Beams change their rows, so their blocks do not count. Neither do blocks of failed sequences."""
    group = sequence.group
    if sequence.is_beam and group is not None and group.is_forked:
        return False
    has_ended_well = sequence.state is State.ENDED and sequence.finish_reason != "error"
    return sequence.row == row or has_ended_well


def _draft_of(sequence: Sequence, token_ids: list[int]) -> Draft:
    name, known = sequence.request.request_id, sequence.num_known_tokens
    return Draft(name, sequence.index, known, token_ids)
