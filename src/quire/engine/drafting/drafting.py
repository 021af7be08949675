"""Propose draft tokens for sequences: the engine's side of speculation.

The scheduler's side is scheduler/branching/drafts.py. Drafters see known tokens only, and draft
tokens reach the scheduler by `control`, so a replay of a recording needs none of this. Tokens that
a grammar forces come first: they are right. Other drafts under a grammar end where it forbids them.

N-grams ("prompt lookup"): of the last n tokens, for n from the most to the fewest that is set, the
newest earlier place where they stand; the tokens after it are the draft. Where that is the
sequence's own end, the sequence repeats itself, and so does the draft. Nothing is kept: all
sequences of a step are searched in one call.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quire.base.messages import Draft
from quire.base.plan import Plan, StepResult
from quire.base.settings.speculation import FORCED, NGRAM, SUFFIX, Speculation
from quire.engine.drafting.draft_pace import (
    KEPT_OF_ALL,
    Chance,
    StepTimes,
    Tried,
    lengths,
    tries_of,
)
from quire.engine.drafting.suffixes import Answers, SuffixGuesser
from quire.engine.grammars.grammars import Grammars
from quire.ops.sampling.find_runs import SEARCHED, find_runs
from quire.scheduler.core.sequence import RowTable, Sequence, State


class NGrams:
    """fewest, most: tokens of the run."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most

    def places(self, table: RowTable, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Find [N] where the last tokens of these rows stood before: the place behind them; -1 if
        they are new."""
        bounds = self._fewest, self._most, SEARCHED
        return find_runs(table.tokens, rows, table.known[rows], *bounds)


def repeated(tokens: npt.NDArray[np.int32], place: int, num: int) -> list[int]:
    """Return `num` tokens that may come next if they go on as behind a place."""
    followed: list[int] = tokens[place : place + num].tolist()
    while len(followed) < num:
        followed += followed[: num - len(followed)]
    return followed


PATIENCE = 4  # looks one by one that found nothing to guess, before a rest
MOST_REST = 4  # steps
MOST_IN_VAIN = 16  # steps until forced tokens are looked for again that were not worth their time


Int64 = npt.NDArray[np.int64]


class Guesses(Protocol):
    """Who guesses, for the core. is_idle: whether there is nobody to guess for. holds_back: whether
    the next plan is to wait until none is in flight. is_ahead: whether the device makes the next
    guesses, also if plans are in flight. looks_ahead: whether `look_ahead` may have something to
    say."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def holds_back(self) -> bool: ...

    @property
    def is_ahead(self) -> bool: ...

    @property
    def looks_ahead(self) -> bool: ...

    def worth(self, table: RowTable, rows: Int64) -> Int64:
        """Return those of the rows for which there may be something to guess."""
        ...

    def guess(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """Guess for those of the sequences for which it is worth its time, before each plan beside
        which no other is in flight, or before each plan. num_running: rows that run, with them."""
        ...

    def follow(self) -> None:
        """Take that a plan is to follow one that is in flight, so the host guesses nothing."""
        ...

    def look_ahead(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """Find out whether to wait for the plans in flight. sequences: that could be guessed for
        then, each with so many tokens on their way."""
        ...

    def planned(self, plan: Plan) -> None:
        """Note which guesses a plan tries."""
        ...

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Take what a plan gave that has been carried out."""
        ...


def rest_after(num_misses: int) -> int:
    """Return how many steps later to look again, after so many looks in vain."""
    return min(MOST_REST, 1 << max(0, num_misses - PATIENCE))


@dataclass(slots=True)
class Guesser:
    """What is known of one sequence. tried: how many tokens it had when guesses were tried last,
    and these. num_misses: steps in a row in which there was nothing to guess, or it was not worth
    its time."""

    history: SuffixGuesser | None  # of methods that keep something
    chance: Chance
    tried: Tried | None = None
    num_misses: int = 0

    def catch_up(self, sequence: Sequence, of_all: Chance) -> None:
        """Take what the sequence has got since, and what became of its guesses. of_all: the chance
        of a guess of any sequence."""
        if self.tried is not None:
            num, num_right = len(self.tried.token_ids), self.tried.num_right(sequence.known_tokens)
            self.chance.observe(num, num_right)
            of_all.observe(num, num_right)
            self.tried = None
        if self.history is not None:
            self.history.extend(sequence.known_tokens[self.history.num_taken :].tolist())

    def rest(self) -> int:
        """Take that nothing is guessed now; returns for how many steps to leave it alone."""
        self.num_misses += 1
        steps = rest_after(self.num_misses)
        self.chance.hope(steps)
        return steps


class Guessed(NamedTuple):
    """Guesses at what a sequence goes on with. chance: of each, if those before it were right;
    guesser: whose they are, None if they are forced."""

    sequence: Sequence
    guesses: list[int]
    chance: float
    guesser: Guesser | None


class Drafting:
    """Guesses for all sequences of an engine, of so many rows. grammars: of its requests.

    A sequence for which there has been nothing to guess for a while rests some steps, so that it
    costs less, and if that is so of all, nobody is looked at.

    Guesses need to know the last token, so no other plan may be in flight. Where more than one is,
    as beside a GPU, each result tells whether to wait for those that are, because guesses should
    bring more than the device loses while it waits for the host; if not, plans follow each other
    as they do without guesses. holds_back: whether to wait.
    """

    def __init__(self, speculation: Speculation, grammars: Grammars, num_rows: int) -> None:
        self._settings, self._grammars = speculation, grammars
        self._only_forced = speculation.method == FORCED
        is_suffix, is_ngram = speculation.method == SUFFIX, speculation.method == NGRAM
        runs = speculation.shortest_run, speculation.longest_run
        self._ngrams = NGrams(*runs) if is_ngram else None
        self._answers = Answers(speculation.suffixes.num_answers if is_suffix else 0)
        self._num_steps = self._num_misses = 0  # of the latter, one by one
        self._rests = 0  # a step, until which nobody is looked at
        self._rests_until = np.zeros(num_rows, np.int64)  # a step, by row, whoever holds it
        self._places = np.full(num_rows, -1)  # where the last tokens of rows stood before
        self._num_in_vain = 0  # steps for which no forced token was worth its time, one by one
        self._forced_from = 0  # a step, from which on they are looked for again
        self.holds_back = False
        self._is_alone = True  # no other plan is in flight beside the last one
        self._began_s = self._taken_s = 0.0
        # From one result to the next, of plans that are not alone: without guesses, and with some.
        self._flowing, self._flowing_tried = StepTimes(), StepTimes()
        self._of: dict[Sequence, Guesser] = {}
        self._has_new = False  # since it was looked for those that have ended
        self._in_row: dict[int, Guesser] = {}  # those of the last guesses
        self._times, self._tried = StepTimes(), StepTimes()  # without guesses, and with some
        self._of_all = Chance(kept=KEPT_OF_ALL)  # where a new sequence begins

    @property
    def is_ahead(self) -> bool:
        """See Guesses."""
        return False

    @property
    def looks_ahead(self) -> bool:
        """See Guesses."""
        return True

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to guess for, or has been nothing to guess for a while."""
        if self._grammars.num_followed:
            return False
        return self._only_forced or self._num_steps < self._rests

    def worth(self, table: RowTable, rows: Int64) -> Int64:
        """See Guesses."""
        rows = rows[self._rests_until[rows] <= self._num_steps]
        if self._ngrams is None or len(rows) == 0:
            return rows
        self._places[rows] = self._ngrams.places(table, rows)
        return rows[(self._places[rows] >= 0) | table.is_masked[rows]]

    def follow(self) -> None:
        """See Guesses."""
        self._is_alone = False

    def guess(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """See Guesses."""
        self._began_s, self._is_alone = time.perf_counter(), True
        if self._has_new:
            self._forget_ended()
        drafts = self._guess(sequences, num_running)
        self.holds_back = bool(drafts)
        self._rest_all(is_worth=self.holds_back)
        return drafts

    def _rest_all(self, is_worth: bool) -> None:
        """Let all rest some steps, the more often it was not worth its time to look at them."""
        self._num_misses = 0 if is_worth else self._num_misses + 1
        self._rests = self._num_steps + rest_after(self._num_misses)

    def look_ahead(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """See Guesses. What guesses should bring is held against what plans bring that follow each
        other."""
        gained = float(num_running)
        if any(sequence.request.grammar for sequence in sequences):
            self.holds_back = True  # masks make the device wait for the host anyway
            return
        found = [e for e in self._find(sequences, num_pending) if len(e.guesses) > num_pending]
        if not found:
            return
        sizes = [len(each.guesses) - num_pending for each in found]
        chances = [each.chance for each in found]
        nums = lengths(sizes, chances, num_running - len(found), self._times, tried=self._tried)
        for num, each in zip(nums, found, strict=True):
            gained += sum(each.chance ** (num_pending + i) for i in range(1, num + 1))
            if num == 0 and each.guesser is not None:
                self._rest(each.sequence, each.guesser)
        tried = self._times if self._tried.seconds(1) is None else self._tried
        seconds = tried.seconds(num_running + sum(nums))
        plainly = self._flowing.seconds(num_running)
        if seconds is None or plainly is None:
            self.holds_back = sum(nums) > 0  # to find out
        else:
            self.holds_back = gained / max(seconds, 1e-9) > num_running / max(plainly, 1e-9)

    def _guess(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        found = self._find(sequences)
        self._in_row = {}
        if not found:
            return []
        sizes, chances = [len(each.guesses) for each in found], [each.chance for each in found]
        drafts = []
        nums = lengths(sizes, chances, num_running - len(found), self._times, tried=self._tried)
        self._weigh_forced([n for n, each in zip(nums, found, strict=True) if not each.guesser])
        for (sequence, guesses, _, guesser), num in zip(found, nums, strict=True):
            if num == 0:
                if guesser is not None:
                    self._rest(sequence, guesser)
                continue
            if guesser is not None:
                guesser.num_misses = 0
                self._in_row[sequence.row] = guesser
            name, known = sequence.request.request_id, sequence.num_known_tokens
            drafts.append(Draft(name, sequence.index, known, guesses[:num]))
        return drafts

    def _weigh_forced(self, nums: list[int]) -> None:
        """Look less often for forced tokens where none is worth its time. nums: how many are tried
        of each row that has some."""
        if any(nums):
            self._num_in_vain = 0
        elif nums:
            self._num_in_vain += 1
            self._forced_from = self._num_steps + min(MOST_IN_VAIN, 1 << self._num_in_vain)

    def _find(self, sequences: list[Sequence], num_pending: int = 0) -> list[Guessed]:
        """Guess for all of the sequences for which there is something to guess. num_pending: tokens
        more, because they are on their way."""
        each_s = (self._guess_at(sequence, num_pending) for sequence in sequences)
        return [each for each in each_s if each is not None]

    def _guess_at(self, sequence: Sequence, num_pending: int) -> Guessed | None:
        """Guess for one sequence: what its grammar forces, or else what others say."""
        guesser, has_grammar = None, bool(sequence.request.grammar)
        if not self._only_forced:
            guesser = self._guesser(sequence)
            guesser.catch_up(sequence, self._of_all)
        most = sequence.limit - sequence.num_known_tokens - 1
        if has_grammar and self._num_steps >= self._forced_from:
            num = min(self._settings.num_forced, most)
            if forced := self._grammars.forced(sequence)[:num]:
                return Guessed(sequence, forced, 1.0, None)
        if guesser is None:
            return None
        num, guesses = min(self._settings.num_tokens + num_pending, most), list[int]()
        if guesser.history is not None:
            guesses = guesser.history.guess(num)
        elif (place := int(self._places[sequence.row])) >= 0:
            guesses = repeated(sequence.known_tokens, place, num)
        if guesses and has_grammar:
            guesses = self._grammars.cut(sequence, guesses)
        if not guesses:
            self._rest(sequence, guesser)
            return None
        return Guessed(sequence, guesses, guesser.chance.value, guesser)

    def _rest(self, sequence: Sequence, guesser: Guesser) -> None:
        """Let a sequence rest for which nothing is guessed now. One with a grammar does not: soon
        something may be forced."""
        num_steps = guesser.rest()
        if not sequence.request.grammar:
            self._rests_until[sequence.row] = self._num_steps + num_steps

    def planned(self, plan: Plan) -> None:
        """Note which guesses a plan tries."""
        self._num_steps += 1
        for row, tried in tries_of(plan).items():
            if (guesser := self._in_row.get(row)) is not None:
                guesser.tried = tried

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Take that a plan has been carried out: what it took counts from when its guesses were
        looked for, or from the result before it."""
        began_s, now_s = max(self._began_s, self._taken_s), time.perf_counter()
        self._taken_s = now_s
        if self.is_idle or began_s == 0.0:  # its start was not measured
            return
        num_guesses = sum(len(draft.token_ids) for draft in plan.drafts)
        num_tokens, num_rows = plan.num_scheduled_tokens, len(plan.rows)
        if num_rows and num_tokens - num_guesses == num_rows:
            kinds = self._times, self._tried, self._flowing, self._flowing_tried
            kind = 2 * (not self._is_alone) + (num_guesses > 0)
            for number, times in enumerate(kinds):
                if number == kind:
                    times.observe(num_tokens, now_s - began_s)
                else:
                    times.pass_one()

    def _guesser(self, sequence: Sequence) -> Guesser:
        found = self._of.get(sequence)
        if found is None:
            self._has_new = True
            found = self._of[sequence] = Guesser(
                self._of_tokens(sequence), Chance(self._of_all.value)
            )
        return found

    def _forget_ended(self) -> None:
        """Forget the sequences that have ended; others may want to guess their last tokens."""
        self._has_new = False
        for sequence in [s for s in self._of if s.state is State.ENDED]:
            self._of.pop(sequence).catch_up(sequence, self._of_all)

    def _of_tokens(self, sequence: Sequence) -> SuffixGuesser | None:
        """Make what remembers where a sequence's tokens stood, if the method needs it."""
        settings, request = self._settings, sequence.request
        if settings.method != SUFFIX:
            return None
        writer = self._answers.writer(request.tenant, request.cache_salt)
        return SuffixGuesser(settings.suffixes, sequence.num_prompt_tokens, self._answers, writer)
