"""Propose draft tokens for sequences: the engine's side of speculation.

The scheduler's side is scheduler/branching/drafts.py. Drafters see known tokens only, and draft
tokens reach the scheduler by `control`, so a replay of a recording needs none of this.

Under a grammar, a draft consists of the tokens that the grammar forces, which are always accepted,
and of looked-up tokens between them. It ends at the first token that the grammar forbids.

N-grams ("prompt lookup"): the last n tokens of a sequence are looked up in its own earlier text. n
runs from the maximum that is set down to the minimum. The tokens after the newest match are the
draft. Where they reach the end of the sequence, the sequence repeats itself, and so does the draft.
There is no index: one call searches all sequences of a step.

Looking up costs time, too. Where nothing is found, look-ups become rarer, as far as their measured
time requires. Where drafts are found but do not pay off, the rows rest for longer (rests.py). Then
a few rows are looked at, and judged as if each stood for many. Once drafts pay off so, all rows are
looked at again. Meanwhile only answers of these few are remembered for others.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from quire.base.messages import Draft
from quire.base.plan import Int32, Int64, Plan, StepResult
from quire.base.settings.speculation import FORCED, NGRAM, SUFFIX, Speculation
from quire.engine.drafting.draft_pace import (
    OLD_WEIGHT_OF_ALL,
    UNLIMITED,
    Chance,
    PlannedDraft,
    StepTimes,
    lengths,
    max_likely,
    planned_drafts,
)
from quire.engine.drafting.plugin_drafter import History, PluginDrafters
from quire.engine.drafting.rests import (
    MAX_REST_STEPS,
    MIN_EACH,
    NUM_SAMPLED,
    REST_STEPS,
    Rests,
    rest_after,
    steps_for,
)
from quire.engine.drafting.suffixes import Answers, SuffixDrafter
from quire.engine.grammars.grammars import Grammars
from quire.engine.grammars.matchers import DraftLimits, GuidedDraft
from quire.ops.sampling.find_runs import SEARCHED, find_runs
from quire.scheduler.core.sequence import RowTable, Sequence, State

MAX_IDLE = 1 << 60  # plans: until a request with a grammar arrives
ABSENT_STEPS = 8  # steps between looks for rows without a grammar, while there are none


class NGrams:
    """Look-up of rows' last `min_tokens` to `max_tokens` tokens in their own earlier text."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens, self._max_tokens = min_tokens, max_tokens

    def places(self, table: RowTable, rows: Int64) -> Int64:
        """Return [N] the position after the newest earlier match of the last tokens, for each of
        `rows` [N]; -1 without a match."""
        bounds = self._min_tokens, self._max_tokens, SEARCHED
        return find_runs(table.tokens, rows, table.known[rows], *bounds)

    def after(self, tokens: Int32, num: int) -> list[int]:
        """Return up to `num` draft tokens after these tokens [T]."""
        bounds = self._min_tokens, self._max_tokens, SEARCHED
        row, length = np.zeros(1, np.int64), np.array([len(tokens)])
        [place] = find_runs(tokens[None], row, length, *bounds).tolist()
        return repeated(tokens, place, num) if place >= 0 else []


def repeated(tokens: Int32, place: int, num: int) -> list[int]:
    """Return `num` draft tokens: `tokens` [T] from `place` on, repeated if there are too few."""
    followed: list[int] = tokens[place : place + num].tolist()
    while len(followed) < num:
        followed += followed[: num - len(followed)]
    return followed


class Drafter(Protocol):
    """Interface of a drafter, for the attachment that calls it.

    num_idle: number of next plans without drafts. A request with a grammar may make it smaller.
    holds_back: whether the next plan must wait until no plan is in flight.
    drafts_on_device: whether the device makes the next draft tokens, even while plans are in
    flight.
    decides_wait: whether `decide_wait` may change `holds_back`.
    max_tokens: token budget of a step, which the attachment sets.
    may_skip: whether the drafter works on after plans that it did not see."""

    max_tokens: int
    may_skip: bool

    @property
    def num_idle(self) -> int: ...

    @property
    def holds_back(self) -> bool: ...

    @property
    def drafts_on_device(self) -> bool: ...

    @property
    def decides_wait(self) -> bool: ...

    def draftable(self, table: RowTable, rows: Int64) -> Int64:
        """Return the rows of `rows` [N] that may have draft tokens."""
        ...

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        """Propose draft tokens for the sequences where drafting is expected to pay off. The core
        calls it before each plan if `drafts_on_device`, else only while no plan is in flight.
        num_running: number of running rows, including these sequences."""
        ...

    def follow(self) -> None:
        """Note that the next plan follows one in flight, so the host proposes nothing for it."""
        ...

    def decide_wait(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """Decide whether the next plan waits for the plans in flight. sequences: candidates for
        drafting after these plans, each with `num_pending` pending tokens."""
        ...

    def planned(self, plan: Plan) -> None:
        """Note which draft tokens a plan verifies."""
        ...

    def skip_plans(self, num: int) -> None:
        """Advance the number of steps by plans for which neither `planned` nor `observe` is called.
        A negative number corrects a rest that ended early."""
        ...

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Record how long an executed plan took, and how many of its draft tokens were accepted."""
        ...


@dataclass(slots=True)
class DraftState:
    """Drafting state of one sequence."""

    history: History | None  # for the suffix method and for plug-ins
    chance: Chance
    verified: PlannedDraft | None = None  # draft tokens that the last plan with some verified
    is_forced: Seq[bool] = ()  # for each draft token of the last proposal under a grammar
    num_misses: int = 0  # steps in a row without draft tokens, or in which none paid off

    def catch_up(self, sequence: Sequence, of_all: Chance) -> None:
        """Add the sequence's new tokens, and record how many of its draft tokens were accepted.
        of_all: the acceptance estimate over all sequences, which is updated as well."""
        if self.verified is not None:
            num, num_right = (
                len(self.verified.token_ids),
                self.verified.num_right(sequence.known_tokens),
            )
            if self.is_forced:  # forced tokens do not count
                num -= sum(self.is_forced[:num])
                num_right -= sum(self.is_forced[:num_right])
            self.chance.observe(num, num_right)
            of_all.observe(num, num_right)
            self.verified = None
        if self.history is not None:
            self.history.extend(sequence.known_tokens[self.history.num_taken :].tolist())

    def rest(self, max_steps: int) -> int:
        """Count a step without draft tokens, and return how many steps later to look again."""
        self.num_misses += 1
        steps = rest_after(self.num_misses, max_steps)
        self.chance.hope(steps)
        return steps


class Proposal(NamedTuple):
    """Draft tokens proposed for one sequence."""

    sequence: Sequence
    draft_ids: list[int]
    chance: float  # acceptance probability of each, if all before it are accepted
    draft_state: DraftState | None  # None if the method proposes forced tokens only
    is_forced: Seq[bool] = ()  # for each, if the sequence has a grammar

    @property
    def is_guided(self) -> bool:
        """Whether the sequence has a grammar."""
        return bool(self.sequence.request.grammar)

    @property
    def chances(self) -> float | list[float]:
        """The acceptance probability of all draft tokens, or of each."""
        if not self.is_forced:
            return self.chance
        return [1.0 if is_forced else self.chance for is_forced in self.is_forced]


class Drafting:
    """Drafter on the host for all sequences of an engine. grammars: of the requests. plugin: maker
    of a plug-in's drafters, if the method is a plug-in.

    A sequence that has had no draft tokens for a while rests for some steps, to save look-ups. All
    rows with a grammar, and all others, also rest together (`_decide_rests`).

    A draft follows the last token, which must be known, so no other plan may be in flight. Where
    several plans are in flight, as on a GPU, each result decides whether the next plan waits for
    the others (`holds_back`). It waits if drafting should gain more than the device loses by
    waiting for the host. If not, plans follow each other as they do without drafts."""

    may_skip = True

    def __init__(
        self,
        speculation: Speculation,
        grammars: Grammars,
        num_rows: int,
        plugin: PluginDrafters | None = None,
    ) -> None:
        self._settings, self._grammars, self._plugin = speculation, grammars, plugin
        self._only_forced, self.max_tokens = speculation.method == FORCED, UNLIMITED
        is_suffix, is_ngram = speculation.method == SUFFIX, speculation.method == NGRAM
        runs = speculation.shortest_run, speculation.longest_run
        self._ngrams = NGrams(*runs) if is_ngram else None
        self._answers = Answers(speculation.suffixes.num_answers if is_suffix else 0)
        self._num_steps = 0  # steps planned
        # Of rows without a grammar, and with one. Forced tokens are looked for at each step, unless
        # that is known to take long.
        self._plain_rests, self._guided_rests = Rests(REST_STEPS), Rests(1)
        self._kinds = self._plain_rests, self._guided_rests  # by whether rows have a grammar
        self._looks = 0, 0  # rows of each kind that the last look-up was for
        self._num_each = [1, 1]  # rows that each of them then stood for
        self._num_samples = [0, 0]  # steps with such look-ups, so that each takes other rows
        self._has_drafted = [False, False]  # which kinds have draft tokens from the last call
        self._rests_until = np.zeros(num_rows, np.int64)  # [R] step before which a row rests
        self._places = np.full(num_rows, -1)  # [R] positions after earlier matches
        self._looked_at = -1  # the last step before which look-ups took place
        self._looked_s = 0.0  # when the last look-up began
        self._plain_s = 0.0  # its seconds for matches of rows without a grammar
        self._caught_up_s = [0.0, 0.0]  # its seconds of each kind for new tokens of sequences
        self.holds_back = False
        self._is_alone = True  # no other plan was in flight with the last one
        self._began_s = self._taken_s = 0.0
        # Seconds between results of plans that overlap: without draft tokens, and with some.
        self._flowing, self._flowing_verified = StepTimes(), StepTimes()
        self._of: dict[Sequence, DraftState] = {}
        self._has_new = False  # a sequence was added since ended ones were removed
        self._in_row: dict[int, DraftState] = {}  # rows with draft tokens from the last call
        self._times, self._verified = StepTimes(), StepTimes()  # without drafts, and with some
        self._of_all = Chance(old_weight=OLD_WEIGHT_OF_ALL)  # initial chance of a new sequence

    @property
    def drafts_on_device(self) -> bool:
        return False

    @property
    def decides_wait(self) -> bool:
        return True

    @property
    def num_idle(self) -> int:
        """See `Drafter`. It is 0 unless each kind of rows rests or is impossible."""
        until = MAX_IDLE if self._only_forced else self._plain_rests.until
        if until > self._num_steps and self._grammars.num_followed:
            until = min(until, self._guided_rests.until)
        return max(0, until - self._num_steps)

    def draftable(self, table: RowTable, rows: Int64) -> Int64:
        self._looked_s, is_guided = time.perf_counter(), table.is_masked[rows]
        self._caught_up_s = [0.0, 0.0]
        plain, guided = rows[~is_guided], rows[is_guided]
        if len(plain) == 0 < len(guided):
            until = min(self._guided_rests.until, self._num_steps + ABSENT_STEPS)
            self._plain_rests.until = max(self._plain_rests.until, until)  # a debt remains
        plain = self._ready(plain[:0] if self._only_forced else plain, is_guided=False)
        guided = self._ready(guided, is_guided=True)
        self._looks = len(plain), len(guided)
        rows, self._plain_s = np.concatenate((guided, plain)), 0.0
        if self._ngrams is None or len(rows) == 0:
            return rows
        if len(guided):
            self._places[guided] = self._ngrams.places(table, guided)
        if len(plain):
            began_s = time.perf_counter()
            self._places[plain] = self._ngrams.places(table, plain)
            self._plain_s = time.perf_counter() - began_s
        return rows[(self._places[rows] >= 0) | table.is_masked[rows]]

    def _ready(self, rows: Int64, *, is_guided: bool) -> Int64:
        """Return the rows of a kind that do not rest, or a sample of them if only that is due. If
        all rest, the kind rests as long."""
        rests, self._num_each[is_guided] = self._kinds[is_guided], 1
        if len(rows) == 0 or self._num_steps < rests.until:
            return rows[:0]
        until = self._rests_until[rows]
        rests.until = max(rests.until, int(until.min()))
        rows = rows[until <= self._num_steps]
        num_sampled = min(NUM_SAMPLED, max(1, len(rows) // MIN_EACH))
        num_each = len(rows) // num_sampled
        if not rests.is_sampled or num_each < 2 or self.drafts_on_device and not is_guided:
            return rows
        self._num_each[is_guided] = num_each
        return np.roll(rows, -num_sampled * self._num_samples[is_guided])[:num_sampled]

    def follow(self) -> None:
        self._is_alone = False

    def propose(self, sequences: list[Sequence], num_running: int) -> list[Draft]:
        self._began_s, self._is_alone = time.perf_counter(), True
        self._looked_at = self._num_steps + 1
        if self._has_new:
            self._forget_ended()
            self._looked_s += time.perf_counter() - self._began_s
        self._in_row = {}
        if self._verified.seconds(1) is not None and not self._times.is_known(num_running):
            self.holds_back = False
            return []  # measure a plain step first
        num_guided = len(sequences)
        if all(self._looks):  # rows with a grammar come first
            num_guided = sum(bool(each.request.grammar) for each in sequences)
        found = self.proposals(sequences[:num_guided])
        guided_s = 0.0
        if all(self._looks):
            guided_s = time.perf_counter() - self._looked_s - self._plain_s
            found += self.proposals(sequences[num_guided:])
        nums = self._lengths(found, num_running)
        drafts = self._drafts(found, nums)
        self.holds_back = bool(drafts)
        self._began_s = time.perf_counter()  # steps are timed without look-ups
        self._observe_look(self._began_s - self._looked_s, guided_s, num_running)
        self._decide_rests(found, nums, self._times.seconds(num_running))
        return drafts

    def _observe_look(self, look_s: float, guided_s: float, num_running: int) -> None:
        """Record the time of a look-up, and choose how rare failed ones become. The time to add
        new tokens does not count, since it grows with rests. guided_s: the part for rows with a
        grammar, if both kinds of rows were looked at."""
        step_s = self._times.seconds(num_running)
        own_s = (look_s - guided_s, guided_s) if all(self._looks) else (look_s, look_s)
        for rests, num, seconds, caught_up_s in zip(
            self._kinds, self._looks, own_s, self._caught_up_s, strict=True
        ):
            if num and not self._has_new:  # else most of the time was that of its prompt
                rests.row_times.append((seconds - caught_up_s) / num)
            if num and step_s is not None:
                steps = steps_for(rests.look_s(num), step_s)
                rests.max_steps = min(MAX_REST_STEPS, steps)

    def _decide_rests(self, found: list[Proposal], nums: Seq[int], step_s: float | None) -> None:
        """Let each kind of rows rest as its proposals require. nums: accepted lengths of `found`.
        step_s: expected time of a step. A refused draft under a grammar counts if it begins with a
        forced token; otherwise the grammar may soon force some."""
        step, self._has_drafted = self._num_steps, [False, False]
        for is_guided, rests in enumerate(self._kinds):
            if not self._looks[is_guided]:
                continue
            is_sample = self._num_each[is_guided] > 1
            own = [i for i, each in enumerate(found) if each.is_guided == is_guided]
            if any(nums[i] for i in own):
                rests.end(step, is_sample=is_sample)
                self._has_drafted[is_guided] = True
                continue
            if step_s is not None:
                look_s = rests.look_s(self._looks[is_guided])
                look_s += 0.0 if self._has_new else self._caught_up_s[is_guided]
                rests.spend(step, look_s / max(step_s, 1e-9))
            if own and all(found[i].is_forced[:1] != [False] for i in own):
                self._hope(rests.refuse(step), [found[i] for i in own])
            else:
                rests.miss(step, is_sample=is_sample)

    def _hope(self, num_steps: int, refused: list[Proposal]) -> None:
        """Raise the acceptance estimates of refused proposals and of new sequences."""
        self._of_all.hope(num_steps)
        for each in refused:
            if each.draft_state is not None:
                each.draft_state.chance.hope(num_steps)

    def decide_wait(self, sequences: list[Sequence], num_pending: int, num_running: int) -> None:
        """See `Drafter`. Compare the token rate expected with drafts to the rate of overlapping
        plans. A sample is judged as if the other rows had the same proposals."""
        gained, num_each = float(num_running), self._num_each[False]
        if any(sequence.request.grammar for sequence in sequences):
            self.holds_back = True  # masks make the device wait for the host anyway
            return
        every = self.proposals(sequences, num_pending)
        own = [each for each in every if len(each.draft_ids) > num_pending]
        if not own:
            return
        found = own * num_each
        sizes = [len(each.draft_ids) - num_pending for each in found]
        chances = [each.chance for each in found]  # of rows without grammars
        nums = lengths(
            sizes, chances, num_running - len(found), self._times, verified=self._verified,
            max_tokens=self.max_tokens,
        )  # fmt: skip
        for num, each in zip(nums, found, strict=True):
            gained += sum(each.chance ** (num_pending + i) for i in range(1, num + 1))
        for num, each in zip(nums, own, strict=False):
            if num == 0 and each.draft_state is not None:
                self._rest(each.sequence, each.draft_state)
        verified = self._times if self._verified.seconds(1) is None else self._verified
        seconds = verified.seconds(num_running + sum(nums))
        if seconds is not None:
            seconds += self._plain_rests.look_s(len(sequences) * num_each)
        plainly = self._flowing.seconds(num_running)
        if seconds is None or plainly is None:
            self.holds_back = sum(nums) > 0  # measure it
        else:
            self.holds_back = gained / max(seconds, 1e-9) > num_running / max(plainly, 1e-9)

    def _lengths(self, found: list[Proposal], num_running: int) -> list[int]:
        """Return how many tokens of each proposal should pay off. A sample is judged as if the
        other rows had the same proposals, after a look-up for all of them."""
        others_s = sum(
            self._kinds[kind].look_s(self._looks[kind] * (self._num_each[kind] - 1))
            for kind in {each.is_guided for each in found}
        )
        judged = [*found]
        for each in found:
            judged += [each] * (self._num_each[each.is_guided] - 1)
        if not judged:
            return []
        nums = lengths(
            [len(each.draft_ids) for each in judged],
            [each.chances for each in judged],
            num_running - len(judged),
            self._times,
            (lambda _: others_s) if others_s else None,
            self._verified,
            max_tokens=self.max_tokens,
        )
        return nums[: len(found)]

    def _drafts(self, found: list[Proposal], nums: Seq[int]) -> list[Draft]:
        """Return drafts of these lengths, and let the sequences of all others rest."""
        drafts = []
        for each, num in zip(found, nums, strict=True):
            sequence, draft_state = each.sequence, each.draft_state
            if num == 0:
                if draft_state is not None:
                    self._rest(sequence, draft_state)
                continue
            if draft_state is not None:
                draft_state.num_misses, draft_state.is_forced = 0, each.is_forced
                self._in_row[sequence.row] = draft_state
            name, known = sequence.request.request_id, sequence.num_known_tokens
            drafts.append(Draft(name, sequence.index, known, each.draft_ids[:num]))
        return drafts

    def proposals(self, sequences: list[Sequence], num_pending: int = 0) -> list[Proposal]:
        """Propose draft tokens for each sequence that has some. num_pending: pending tokens, which
        the drafts must cover as well."""
        each_s = (self._propose_for(sequence, num_pending) for sequence in sequences)
        return [each for each in each_s if each is not None]

    def _propose_for(self, sequence: Sequence, num_pending: int) -> Proposal | None:
        """Propose draft tokens for one sequence."""
        draft_state = None
        if not self._only_forced:
            began_s = time.perf_counter()
            draft_state = self._draft_state(sequence)
            draft_state.catch_up(sequence, self._of_all)
            is_guided = bool(sequence.request.grammar)
            self._caught_up_s[is_guided] += time.perf_counter() - began_s
        room = sequence.limit - sequence.num_known_tokens - 1
        if sequence.request.grammar:
            draft_ids, is_forced = self._guided(sequence, draft_state, room)
        else:
            num = min(self._settings.num_tokens + num_pending, room)
            draft_ids, is_forced = self._looked_up(sequence, draft_state, num), []
        if not draft_ids:
            if draft_state is not None:
                self._rest(sequence, draft_state)
            return None
        chance = 1.0 if draft_state is None else draft_state.chance.value
        return Proposal(sequence, draft_ids, chance, draft_state, is_forced)

    def _guided(self, sequence: Sequence, draft_state: DraftState | None, room: int) -> GuidedDraft:
        """Return the draft of a sequence with a grammar, of `room` tokens at most."""
        num_own = self._settings.num_tokens
        if draft_state is not None:
            num_own = min(num_own, max_likely(draft_state.chance.value))

        def propose(ahead: Seq[int]) -> list[int]:
            return self._looked_up(sequence, draft_state, min(num_own, room - len(ahead)), ahead)

        limits = DraftLimits(min(self._settings.num_forced, room), num_own)
        return self._grammars.draft(sequence, propose, limits)

    def _looked_up(
        self, sequence: Sequence, draft_state: DraftState | None, num: int, ahead: Seq[int] = ()
    ) -> list[int]:
        """Return up to `num` draft tokens by the method. ahead: draft tokens before them."""
        if draft_state is None or num <= 0:
            return []
        history = draft_state.history
        if isinstance(history, SuffixDrafter):
            return history.propose(num, ahead)
        if history is not None:
            return [] if ahead else history.propose(num)
        if ahead:
            assert self._ngrams is not None, "the method is neither of these"
            tokens = np.append(sequence.known_tokens[-SEARCHED:], np.array(ahead, np.int32))
            return self._ngrams.after(tokens, num)
        place = int(self._places[sequence.row])
        return repeated(sequence.known_tokens, place, num) if place >= 0 else []

    def _rest(self, sequence: Sequence, draft_state: DraftState) -> None:
        """Let a sequence without draft tokens rest."""
        rests = self._guided_rests if sequence.request.grammar else self._plain_rests
        self._rests_until[sequence.row] = self._num_steps + draft_state.rest(rests.max_steps)

    def skip_plans(self, num: int) -> None:
        self._num_steps += num
        self._began_s = self._taken_s = 0.0  # the next result has no start time

    def planned(self, plan: Plan) -> None:
        self._num_steps += 1
        for is_guided, num_each in enumerate(self._num_each):
            self._num_samples[is_guided] += num_each > 1
        for row, verified in planned_drafts(plan).items():
            if (draft_state := self._in_row.get(row)) is not None:
                draft_state.verified = verified

    def observe(self, plan: Plan, result: StepResult) -> None:
        """See `Drafter`. Only steps that compute no prompt are timed: since drafting began, or
        since the previous result if that came later."""
        began_s, now_s = max(self._began_s, self._taken_s), time.perf_counter()
        self._taken_s = now_s
        is_measured = not self.num_idle or self._num_steps == self._looked_at
        if not is_measured or began_s == 0.0:  # its start was not measured
            return
        num_draft_tokens = sum(len(draft.token_ids) for draft in plan.drafts)
        num_tokens, num_rows = plan.num_scheduled_tokens, len(plan.rows)
        if num_rows and num_tokens - num_draft_tokens == num_rows:
            kinds = self._times, self._verified, self._flowing, self._flowing_verified
            kind = 2 * (not self._is_alone) + (num_draft_tokens > 0)
            for number, times in enumerate(kinds):
                if number == kind:
                    times.observe(num_tokens, now_s - began_s)
                else:
                    times.pass_one()
            if kind == 1:
                self._observe_gain(num_tokens, num_rows, result)

    def _observe_gain(self, num_tokens: int, num_rows: int, result: StepResult) -> None:
        """Add what a step with draft tokens gained to the balance of each kind of rows that had
        some. Gains and losses of a sample alone are not representative. If both kinds had draft
        tokens, a loss is only booked for rows without a grammar, since forced tokens are always
        right. num_tokens: of the step. The times are the expected ones, since single steps vary."""
        plain_s, verified_s = self._times.seconds(num_rows), self._verified.seconds(num_tokens)
        if not plain_s or verified_s is None:
            return
        num_right = int(result.num_accepted.sum()) - len(result.num_accepted)
        gain = num_right / num_rows - (verified_s / plain_s - 1)
        for is_guided, rests in enumerate(self._kinds):
            if not self._has_drafted[is_guided] or self._num_each[is_guided] > 1:
                continue
            num_spent = rests.look_s(self._looks[is_guided]) / plain_s
            if gain >= num_spent or not (is_guided and self._has_drafted[False]):
                rests.gain(self._num_steps, gain, num_spent)

    def _draft_state(self, sequence: Sequence) -> DraftState:
        found = self._of.get(sequence)
        if found is None:
            self._has_new = True
            found = self._of[sequence] = DraftState(
                self._of_tokens(sequence), Chance(self._of_all.value)
            )
        return found

    def _forget_ended(self) -> None:
        """Remove ended sequences, after adding their last tokens for other sequences to find."""
        self._has_new = False
        for sequence in [s for s in self._of if s.state is State.ENDED]:
            self._of.pop(sequence).catch_up(sequence, self._of_all)

    def _of_tokens(self, sequence: Sequence) -> History | None:
        """Return a new drafter of a sequence's tokens; None if the method has none."""
        settings, request = self._settings, sequence.request
        if self._plugin is not None:
            return self._plugin.history()
        if settings.method != SUFFIX:
            return None
        writer = self._answers.writer(request.tenant, request.cache_salt)
        return SuffixDrafter(settings.suffixes, sequence.num_prompt_tokens, self._answers, writer)
