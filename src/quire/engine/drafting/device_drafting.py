"""Draft tokens that the device makes, so that plans follow each other.

Where several plans are in flight, the host does not know the last token. So the device looks up
n-grams, as part of each step that verifies them (`ops/sampling/device_drafts.py`). The host
chooses the sequences: those with an earlier match of their last known tokens. A sequence that
copies text is likely to do so some tokens later as well. The host also chooses the number of draft
tokens. It uses how often a sequence's drafts were accepted, and the times between results of steps
with drafts and without.

The host still drafts the tokens that grammars force, and for rows whose sampling needs the host
(DRY, logits processors). It lets the plans in flight end first.
"""

import time

from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.base.settings.speculation import Speculation
from quire.engine.drafting.draft_pace import Chance, lengths
from quire.engine.drafting.drafting import Drafting, DraftState
from quire.engine.grammars.grammars import Grammars
from quire.scheduler.core.sequence import Sequence


class DeviceDrafting(Drafting):
    """Drafter of n-grams on the device, for an engine with several plans in flight."""

    def __init__(self, speculation: Speculation, grammars: Grammars, num_rows: int) -> None:
        super().__init__(speculation, grammars, num_rows)
        self._follows = False  # another plan will be in flight with the next one
        self._has_others = False  # some candidates are drafted for on the host
        self._of_plan: dict[int, dict[int, DraftState]] = {}  # by step, then by row

    @property
    def drafts_on_device(self) -> bool:
        return not self.holds_back

    def follow(self) -> None:
        self._follows = True

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """See `Drafter`. Drafts of the device hold -1 for each token that it is to propose."""
        follows, self._follows = self._follows, False
        found = [sequence for sequence in sequences if _is_plain(sequence)]
        self._has_others = len(found) < len(sequences)
        if not self.drafts_on_device:
            drafts = super().propose(sequences, num_running)
            self.holds_back &= self._has_others
            return drafts
        if not follows:
            self._began_s = time.perf_counter()
        self._is_alone = False  # from now on, plans overlap and are timed as such
        if self._has_new:
            self._forget_ended()
        drafts = self._choose(found, num_running)
        if self._looks[0]:
            has_drafts = drafts or self._has_others
            rest = self._plain_rests.end if has_drafts else self._plain_rests.miss
            rest(self._num_steps, is_sample=False)
        return drafts

    def _choose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """Choose for each sequence how many tokens the device drafts; none if it won't pay off."""
        self._in_row = {}
        draft_states = [self._draft_state(sequence) for sequence in sequences]
        rooms = [s.limit - int(s.table.total[s.row]) - 1 for s in sequences]
        max_drafts = [min(self._settings.num_tokens, room) for room in rooms]
        chances = [draft_state.chance.value for draft_state in draft_states]
        plain, verified = self._flowing, self._flowing_verified
        nums = lengths(
            max_drafts, chances, num_running - len(sequences), plain, verified=verified,
            max_tokens=self.max_tokens,
        )  # fmt: skip
        if plain.seconds(1) is None and verified.seconds(1) is not None:
            nums = [0] * len(nums)  # measure steps without drafts first
        drafts = []
        for sequence, draft_state, num in zip(sequences, draft_states, nums, strict=True):
            if num == 0:
                self._rest(sequence, draft_state)
                continue
            draft_state.num_misses = 0
            self._in_row[sequence.row] = draft_state
            name, known = sequence.request.request_id, sequence.num_known_tokens
            drafts.append(Draft(name, sequence.index, known, [-1] * num))
        return drafts

    def decide_wait(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """See `Drafter`. Only sequences that the host drafts for count."""
        others = [sequence for sequence in sequences if not _is_plain(sequence)]
        if others:
            super().decide_wait(others, num_pending, num_running)

    @property
    def decides_wait(self) -> bool:
        return self._has_others

    def planned(self, plan: Plan) -> None:
        if not plan.is_guessing:
            super().planned(plan)
            return
        self._num_steps += 1
        rows = [draft.row for draft in plan.drafts]
        self._of_plan[plan.step_id] = {r: self._in_row[r] for r in rows if r in self._in_row}

    def observe(self, plan: Plan, result: StepResult) -> None:
        """See `Drafter`. Only the result shows how many drafts of the device were accepted."""
        if plan.is_guessing:
            of_plan = self._of_plan.pop(plan.step_id, {})
            counts = dict(zip(plan.sample_rows.tolist(), result.num_accepted.tolist(), strict=True))
            for draft in plan.drafts:
                if (draft_state := of_plan.get(draft.row)) is not None:
                    _observe(draft_state, self._of_all, len(draft.token_ids), counts[draft.row] - 1)
        if self._of_plan:  # plans that failed have no result
            alive = {n: found for n, found in self._of_plan.items() if n > plan.step_id}
            self._of_plan = alive
        super().observe(plan, result)


def _observe(draft_state: DraftState, of_all: Chance, num: int, num_right: int) -> None:
    draft_state.chance.observe(num, num_right)
    of_all.observe(num, num_right)


def _is_plain(sequence: Sequence) -> bool:
    """Return whether a sequence samples without any work of the host between logits and token."""
    params = sequence.request.params
    return not (sequence.request.grammar or params.has_dry or params.logits_processors)
