"""Guesses that the device makes, so that plans follow each other: which sequences try how many.

Where several plans are in flight the host does not know the last token, so n-grams are looked for
on the device, with each step that is to try some (`ops/sampling/device_guesses.py`). The host says
for whom: those whose known tokens end as they did before, since who goes on copying will still do
so some tokens later; and how many, by how often the guesses of a sequence were right, and by the
times from one result to the next of steps with guesses and of others.

What is not the device's matter is guessed by the host as ever, which lets the plans in flight end
first: what grammars force, and rows of which the host looks at the text before
they choose (DRY).
"""

import time

from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.base.settings.speculation import Speculation
from quire.engine.drafting.draft_pace import Chance, lengths
from quire.engine.drafting.drafting import Drafting, Guesser
from quire.engine.grammars.grammars import Grammars
from quire.scheduler.core.sequence import Sequence


class AheadDrafting(Drafting):
    """Drafting of n-grams for an engine of several plans in flight."""

    def __init__(self, speculation: Speculation, grammars: Grammars, num_rows: int) -> None:
        super().__init__(speculation, grammars, num_rows)
        self._follows = False  # another plan is in flight beside the next one
        self._has_others = False  # there are candidates that are not the device's matter
        self._of_plan: dict[int, dict[int, Guesser]] = {}  # by step, then by row

    @property
    def is_ahead(self) -> bool:
        """See Guesses."""
        return not self.holds_back

    def follow(self) -> None:
        """See Guesses."""
        self._follows = True

    def guess(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """See Guesses. Those of the device are as many ids that stand for nothing."""
        follows, self._follows = self._follows, False
        found = [sequence for sequence in sequences if _is_plain(sequence)]
        self._has_others = len(found) < len(sequences)
        if not self.is_ahead:
            drafts = super().guess(sequences, num_running)
            self.holds_back &= self._has_others
            return drafts
        if not follows:
            self._began_s = time.perf_counter()
        self._is_alone = False  # these steps' times are those of steps that follow each other
        if self._has_new:
            self._forget_ended()
        drafts = self._choose(found, num_running)
        self._rest_all(is_worth=bool(drafts) or self._has_others)
        return drafts

    def _choose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """Let so many guesses be made for each as should pay."""
        self._in_row = {}
        guessers = [self._guesser(sequence) for sequence in sequences]
        rooms = [s.limit - int(s.table.total[s.row]) - 1 for s in sequences]
        most = [min(self._settings.num_tokens, room) for room in rooms]
        chances = [guesser.chance.value for guesser in guessers]
        plain, tried = self._flowing, self._flowing_tried
        nums = lengths(most, chances, num_running - len(sequences), plain, tried=tried)
        if plain.seconds(1) is None and tried.seconds(1) is not None:
            nums = [0] * len(nums)  # to find out what guesses are compared with
        drafts = []
        for sequence, guesser, num in zip(sequences, guessers, nums, strict=True):
            if num == 0:
                self._rest(sequence, guesser)
                continue
            guesser.num_misses = 0
            self._in_row[sequence.row] = guesser
            name, known = sequence.request.request_id, sequence.num_known_tokens
            drafts.append(Draft(name, sequence.index, known, [-1] * num))
        return drafts

    def look_ahead(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """See Guesses. Only those count for which the host would have to guess."""
        others = [sequence for sequence in sequences if not _is_plain(sequence)]
        if others:
            super().look_ahead(others, num_pending, num_running)

    @property
    def looks_ahead(self) -> bool:
        """See Guesses."""
        return self._has_others

    def planned(self, plan: Plan) -> None:
        """See Guesses."""
        if not plan.is_guessing:
            super().planned(plan)
            return
        self._num_steps += 1
        rows = [draft.row for draft in plan.drafts]
        self._of_plan[plan.step_id] = {r: self._in_row[r] for r in rows if r in self._in_row}

    def observe(self, plan: Plan, result: StepResult) -> None:
        """See Guesses. What became of the device's guesses, only the result tells."""
        if plan.is_guessing:
            of_plan = self._of_plan.pop(plan.step_id, {})
            counts = dict(zip(plan.sample_rows.tolist(), result.num_accepted.tolist(), strict=True))
            for draft in plan.drafts:
                if (guesser := of_plan.get(draft.row)) is not None:
                    _observe(guesser, self._of_all, len(draft.token_ids), counts[draft.row] - 1)
        if self._of_plan:  # of plans that failed nothing was told
            alive = {n: found for n, found in self._of_plan.items() if n > plan.step_id}
            self._of_plan = alive
        super().observe(plan, result)


def _observe(guesser: Guesser, of_all: Chance, num: int, num_right: int) -> None:
    guesser.chance.observe(num, num_right)
    of_all.observe(num, num_right)


def _is_plain(sequence: Sequence) -> bool:
    """Tell whether nothing of a sequence's choices needs the host between logits and token."""
    params = sequence.request.params
    return not (sequence.request.grammar or params.has_dry or params.logits_processors)
