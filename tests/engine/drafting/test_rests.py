"""Rests of the real drafter: steps without drafts. Sequences, steps and the clock are simulated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from quire.base.plan import RowDraft
from quire.base.settings.speculation import FORCED, NGRAM, SUFFIX, Speculation
from quire.engine.drafting import drafting
from quire.engine.drafting.drafting import ABSENT_STEPS, Drafting, NGrams
from quire.engine.drafting.rests import (
    GROWTH_LOOKS,
    MAX_DEBT_STEPS,
    MAX_REFUSED_STEPS,
    MAX_REST_STEPS,
    NUM_SAMPLED,
    Rests,
    rest_after,
    steps_for,
)
from quire.engine.grammars.matchers import GuidedDraft
from quire.scheduler.core.sequence import RowTable, State
from tests.support.cases import in_turn

STEP_S = 0.010
TOKEN = 7
TOKENS = np.full(1 << 17, TOKEN, np.int32)  # longer than any sequence here


class Clock:
    """Clock that only its users advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(drafting, "time", made)
    return made


class FakeSequence:
    """Sequence of equal tokens, as far as the drafter looks at it."""

    def __init__(self, row: int, grammar: str = "") -> None:
        self.row, self.index, self.limit, self.num_prompt_tokens = row, 0, 1 << 20, 1
        self.state, self.num_known_tokens = State.RUNNING, 1
        self.request: Any = SimpleNamespace(
            request_id=str(id(self)), grammar=grammar, tenant="", cache_salt=""
        )

    @property
    def known_tokens(self) -> Any:
        return TOKENS[: self.num_known_tokens]


@dataclass
class Rig:
    """Engine without a model. All draft tokens are right.

    step_s: seconds of a step, by its draft tokens. look_s: seconds of a look-up for a row. token_s:
    seconds to add a token to the drafter of a row.
    forced: number of tokens that each grammar forces at a step. finds: whether other rows find
    drafts. drafted: lengths of the drafts of each step, by row. looked: rows of each look-up.
    """

    clock: Clock
    num_rows: int
    num_guided: int = 0
    method: str = SUFFIX
    step_s: Callable[[int], float] = lambda num: STEP_S
    look_s: float = 0.0
    token_s: float = 0.0
    forced: Callable[[int], int] = lambda step: 0
    finds: bool = True
    drafted: list[dict[int, int]] = field(default_factory=list)
    looked: list[list[int]] = field(default_factory=list)
    looking_s: float = 0.0

    def __post_init__(self) -> None:
        self.table = RowTable(self.num_rows, 2)
        self.table.is_masked[: self.num_guided] = True
        self.sequences: list[Any] = [
            FakeSequence(row, "grammar" if row < self.num_guided else "")
            for row in range(self.num_rows)
        ]
        grammars: Any = SimpleNamespace(num_followed=self.num_guided, draft=self._forced)
        plugin: Any = SimpleNamespace(history=lambda: FakeHistory(self))
        speculation = Speculation(self.method, 4)
        self.drafter = Drafting(speculation, grammars, self.num_rows, plugin)

    def _forced(self, *_: object) -> GuidedDraft:
        self.look()
        num = self.forced(len(self.drafted))
        return GuidedDraft([TOKEN] * num, [True] * num)

    def look(self) -> None:
        self.clock.now_s += self.look_s
        self.looking_s += self.look_s

    def run(self, num_steps: int) -> "Rig":
        """Run steps in which each row gets one token, and its draft tokens."""
        for _ in range(num_steps):
            drafts, drafter = [], self.drafter
            is_idle = drafter.num_idle > 0
            if is_idle:
                drafter.skip_plans(1)
            else:
                rows = drafter.draftable(self.table, np.arange(self.num_rows))
                self.looked.append(rows.tolist())
                found = [self.sequences[row] for row in rows]
                drafts = drafter.propose(found, self.num_rows)
            row_of = {each.request.request_id: each.row for each in self.sequences}
            nums = {row_of[each.request_id]: len(each.token_ids) for each in drafts}
            plan = self._plan(nums)
            if not is_idle:
                drafter.planned(plan)
            self.clock.now_s += self.step_s(sum(nums.values()))
            for each in self.sequences:
                each.num_known_tokens += 1 + nums.get(each.row, 0)
            if not is_idle:
                result: Any = SimpleNamespace(num_accepted=plan.num_tokens)
                drafter.observe(plan, result)
            self.drafted.append(nums)
        return self

    def plan(self) -> Any:
        """Return a plan of a token for each row, without draft tokens."""
        return self._plan({})

    def _plan(self, nums: dict[int, int]) -> Any:
        num_drafts = np.array([nums.get(row, 0) for row in range(self.num_rows)])
        known = np.array([each.num_known_tokens for each in self.sequences])
        return SimpleNamespace(
            drafts=[RowDraft(row, np.full(num, TOKEN, np.int32)) for row, num in nums.items()],
            rows=np.arange(self.num_rows),
            num_scheduled_tokens=self.num_rows + int(num_drafts.sum()),
            computed_bound=known - 1, num_tokens=1 + num_drafts, num_drafts=num_drafts,
        )  # fmt: skip

    def know(self, sizes: Sequence[int]) -> None:
        """Give the drafter the times of steps with these numbers of draft tokens."""
        for num in sizes:
            times = self.drafter._verified if num else self.drafter._times
            for _ in range(3):
                times.observe(self.num_rows + num, self.step_s(num))

    def first_draft(self, begin: int = 0) -> int:
        """Return how many steps after `begin` the first step with drafts came."""
        return next(i for i, nums in enumerate(self.drafted[begin:]) if nums)


class FakeHistory:
    """Drafter of one sequence, which knows its next tokens."""

    def __init__(self, rig: Rig) -> None:
        self.num_taken, self._rig = 0, rig

    def extend(self, token_ids: list[int]) -> None:
        self.num_taken += len(token_ids)
        self._rig.clock.now_s += self._rig.token_s * len(token_ids)

    def propose(self, num: int) -> list[int]:
        self._rig.look()
        return [TOKEN] * num if self._rig.finds else []


# ---- rows with a grammar -------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [64, 256])
def test_refusal_does_not_stop_the_forced_tokens_of_one_row(clock: Clock, num_rows: int) -> None:
    """One forced token among so many rows gains less than MIN_GAIN; 32 gain 12 % or more."""
    rig = Rig(clock, num_rows, 1, FORCED, forced=lambda step: 32 if step > 20 else step == 20)
    rig.run(60)
    assert rig.first_draft() in (21, 22)
    assert all(nums == {0: 32} for nums in rig.drafted[22:])


def test_refusal_of_plain_rows_does_not_stop_forced_tokens(clock: Clock) -> None:
    """Drafts of plain rows gain less than they cost, and 32 forced tokens gain more."""
    sizes, times = (0, 8, 32, 256), (1.0, 1.3, 1.4, 6.0)
    rig = Rig(
        clock, 64, 1, step_s=lambda num: STEP_S * float(np.interp(num, sizes, times)),
        forced=lambda step: 32 * (step >= 60),
    )  # fmt: skip
    rig.know(sizes)
    rig.run(60)
    assert rig.drafter._plain_rests.num_refused > 3 and not any(rig.drafted)
    rig.run(60)
    assert rig.drafted[60:] == [{0: 32}] * 60


def test_failed_sample_of_plain_rows_is_no_refusal_of_guided_rows(clock: Clock) -> None:
    """A look-up for all plain rows would take three steps, and the grammar gains a quarter."""
    rig = Rig(
        clock, 128, 1, look_s=3 * STEP_S / 128, forced=lambda step: 32, finds=False
    )  # fmt: skip
    for _ in range(600):
        rig.run(1)
        assert not rig.drafter._guided_rests.num_refused
    assert any(1 < len(rows) < 128 for rows in rig.looked)


@pytest.mark.parametrize("num_right", [0, 1])
def test_loss_is_booked_to_plain_rows_if_they_had_drafts(clock: Clock, num_right: int) -> None:
    """Otherwise to guided rows. A gain smaller than the time of a look-up is a loss too."""
    rig = Rig(clock, 8, 4, step_s=lambda num: STEP_S * (1.1 if num else 1.0))
    rig.know((0, 8))
    drafter, result = rig.drafter, SimpleNamespace(num_accepted=np.array([1] * 7 + [1 + num_right]))
    drafter._looks = 4, 4
    for rests in drafter._kinds:
        rests.row_times.append(0.1 * STEP_S)
    balances = []
    for has_plain in (True, False):
        drafter._has_drafted = [has_plain, True]
        drafter._observe_gain(16, 8, result)  # type: ignore[arg-type]
        balances.append([rests.balance for rests in drafter._kinds])
    (plain, guided), (plain_after, guided_after) = balances
    assert plain == plain_after < guided and guided_after < guided


# ---- waking up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 24, 32])
def test_drafting_resumes_on_short_answers(clock: Clock, length: int) -> None:
    """Steps with drafts take longer, and drafts were wrong so far. From now on all are right."""
    sizes, times = (0, 1, 2, 5, 32), (1.0, 1.7, 1.9, 2.2, 5.0)
    rig = Rig(clock, 1, step_s=lambda num: STEP_S * float(np.interp(num, sizes, times)))
    drafter = rig.drafter
    rig.know(sizes)
    drafter._of_all.value = 0.2
    for _ in range(8):
        end = len(rig.drafted) + length
        while len(rig.drafted) < end:
            rig.run(1)
        rig.sequences[0].state = State.ENDED
        rig.sequences[0] = FakeSequence(0)
    assert rig.first_draft() < 100
    assert sum(map(bool, rig.drafted[-length:])) > length / 2


def test_answer_that_ends_during_refusals_is_indexed(clock: Clock) -> None:
    rig = Rig(clock, 1)
    drafter = Drafting(Speculation(SUFFIX, 8), Mock(num_followed=0), 1)
    drafter._plain_rests.num_refused = 3
    tokens = np.array([1, *range(100, 140)], np.int32)
    first, second, third = (Mock(wraps=FakeSequence(0)) for _ in range(3))
    for each, known in ((first, tokens[:5]), (second, tokens[:1]), (third, tokens[:12])):
        each.configure_mock(
            request=rig.sequences[0].request, limit=200, num_prompt_tokens=1,
            known_tokens=known, num_known_tokens=len(known), state=State.RUNNING, row=0,
        )  # fmt: skip
    drafter.propose([first], 1)
    first.configure_mock(known_tokens=tokens, num_known_tokens=len(tokens), state=State.ENDED)
    drafter.propose([second], 1)
    [found] = drafter.proposals([third])
    assert found.draft_ids == tokens[12:20].tolist()


@pytest.mark.parametrize(
    ("num_rows", "few"), [pytest.param(800, 1.0, marks=pytest.mark.slow), (512, 1.1)]
)
def test_sample_decides_for_all_rows(clock: Clock, num_rows: int, few: float) -> None:
    """Eight rows alone can gain 1.8 % at most, but all rows gain 80 % and more."""

    def step_s(num_drafts: int) -> float:
        return STEP_S * (few + 0.3 * num_drafts / (4 * num_rows) if num_drafts else 1.0)

    rig = Rig(clock, num_rows, step_s=step_s)
    drafter = rig.drafter
    rig.know((0, 8, 4 * num_rows))
    for _ in range(6):
        drafter._plain_rests.refuse(0)
    rig.run(80)
    assert rig.first_draft() <= MAX_REFUSED_STEPS
    assert len(rig.drafted[rig.first_draft()]) == NUM_SAMPLED
    assert all(len(nums) == num_rows for nums in rig.drafted[-20:])


@pytest.mark.parametrize("num_rows", [2, 4, 9])
def test_samples_rotate_through_all_rows(clock: Clock, num_rows: int) -> None:
    rig = Rig(clock, num_rows, finds=False)
    for _ in range(6):
        rig.drafter._plain_rests.refuse(0)
    rig.run(6 * MAX_REFUSED_STEPS)
    samples = [rows for rows in rig.looked if rows]
    assert all(len(rows) < num_rows for rows in samples)
    assert {row for rows in samples[:5] for row in rows} == set(range(num_rows))


# ---- the time of look-ups ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "look_ms", "method"),
    in_turn([(1, 0), (1, 1), (20, 0), (20, 10), (9, 1)], [0.01, 0.5, 1.0, 3.2], [SUFFIX, FORCED]),
)
def test_failed_look_ups_take_about_1_percent_of_the_time_at_most(
    clock: Clock, rows: tuple[int, int], look_ms: float, method: str
) -> None:
    """rows: all rows and rows with a grammar. look_ms: of a look-up for all; a step has 10 ms."""
    num_rows, num_guided = rows
    look_s = look_ms / 1000 / num_rows
    rig = Rig(clock, num_rows, num_guided, method, look_s=look_s, finds=False)
    rig.run(2000)
    assert not any(rig.drafted)
    assert rig.looking_s < 0.011 * clock.now_s
    if look_ms < 0.05 and (num_guided or method == SUFFIX):
        assert rig.looking_s >= 0.9 * 2000 * look_s * (num_rows if method == SUFFIX else num_guided)


def test_look_ups_of_many_short_answers_are_paid_for_once(clock: Clock) -> None:
    """A look-up for all rows takes as long as three steps, and each answer ends after 64 steps."""
    rig = Rig(clock, 64, 64, look_s=3 * STEP_S / 64, finds=False)
    num_idle = 0
    for step in range(2000):
        num_idle += rig.drafter.num_idle > 0
        rig.run(1)
        if step % 64 == 63:
            rig.sequences = [FakeSequence(row, "grammar") for row in range(64)]
    assert rig.looking_s < 6 * STEP_S + 0.006 * clock.now_s
    assert num_idle > 1600, "the drafter is idle while these rows rest"


def test_new_rows_without_a_grammar_soon_get_drafts(clock: Clock) -> None:
    rig = Rig(clock, 64, 64, look_s=3 * STEP_S / 64, finds=False).run(200)
    assert rig.drafter.num_idle > 0
    rig.table.is_masked[32:] = False
    rig.sequences[32:] = [FakeSequence(row) for row in range(32, 64)]
    rig.finds = True
    rig.run(2 * ABSENT_STEPS)
    assert rig.first_draft(200) <= ABSENT_STEPS


def test_a_debt_outlasts_the_absence_of_its_rows(clock: Clock) -> None:
    """For example, while all rows without a grammar compute their prompts."""
    rig = Rig(clock, 8, 4, look_s=STEP_S, finds=False).run(20)
    until = rig.drafter._plain_rests.until
    assert until > 20 + ABSENT_STEPS
    rig.drafter.draftable(rig.table, np.arange(4))
    assert rig.drafter._plain_rests.until == until


def test_match_times_are_booked_to_the_kind_of_row(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A match takes 1 ms per row without a grammar, and nothing for the others."""

    def places(_: object, table: RowTable, rows: Any) -> Any:
        clock.now_s += 0.001 * float((~table.is_masked[rows]).sum())
        return np.full(len(rows), -1)

    monkeypatch.setattr(NGrams, "places", places)
    rig = Rig(clock, 8, 4, NGRAM).run(2)
    looks = [rests.look_s(1) for rests in rig.drafter._kinds]
    assert looks == pytest.approx([0.001, 0.0])


def test_drafting_resumes_for_many_rows_with_a_grammar(clock: Clock) -> None:
    """A sample of the rows shows that their grammars now force tokens."""
    rig = Rig(
        clock, 64, 64, FORCED, look_s=STEP_S / 200, forced=lambda step: 8 * (step >= 500)
    )  # fmt: skip
    rig.run(500 + 2 * MAX_DEBT_STEPS)
    first = rig.first_draft()
    assert len(rig.drafted[first]) == NUM_SAMPLED and first <= 500 + MAX_DEBT_STEPS
    assert sum(len(nums) == 64 for nums in rig.drafted[first + 1 :]) > 200


# ---- gains and losses ----------------------------------------------------------------------------


def test_gains_pay_for_failed_look_ups() -> None:
    """A look-up takes half of a step. Without gains, only the first ones are free."""
    for num_gains, num_free in ((0, 1), (3, 4)):
        rests, step, found = Rests(1), 0, 0
        for step in range(num_gains):
            rests.gain(step, 1.0)
        rests.end(step, is_sample=False)
        while not rests.is_sampled:
            step, found = rests.until, found + 1
            rests.spend(step, 0.5)
            rests.miss(step, is_sample=False)
        assert found - 1 == num_free
        assert rests.until - step >= 50


def test_drafting_stops_when_it_loses_time() -> None:
    """Even if each draft was expected to pay off. A single loss counts only up to a bound."""
    rests, step = Rests(1), 0
    while rests.until <= step:
        rests.end(step, is_sample=False)
        rests.gain(step + 1, -50.0 if step == 0 else -0.2)
        step += 1
        assert step < 10
    assert step > 1 and rests.until - step > 20
    rests.end(rests.until, is_sample=True)
    rests.gain(rests.until, 1.0)
    assert rests.balance > 0


@pytest.mark.parametrize(
    ("few", "num_rows"), [pytest.param(1.3, 256, marks=pytest.mark.slow), (1.5, 128)]
)
def test_loss_of_a_sample_is_not_booked(clock: Clock, few: float, num_rows: int) -> None:
    """The balance is negative when drafts begin to pay off."""

    def step_s(num_drafts: int) -> float:
        return STEP_S * (few + 0.3 * num_drafts / (4 * num_rows) if num_drafts else 1.0)

    look_s = 0.3 * STEP_S / num_rows
    rig = Rig(clock, num_rows, step_s=step_s, look_s=look_s, finds=False).run(300)
    assert rig.drafter._plain_rests.balance < 0.1
    rig.finds = True
    rig.run(400)
    assert sum(len(nums) == num_rows for nums in rig.drafted) > 400 - 1.1 * MAX_DEBT_STEPS


@pytest.mark.parametrize(
    ("num_rows", "step_s"), [pytest.param(64, 0.010, marks=pytest.mark.slow), (16, 0.005)]
)
def test_tokens_indexed_after_a_rest_do_not_count_as_look_up_time(
    clock: Clock, num_rows: int, step_s: float
) -> None:
    """Indexing the tokens of 256 steps takes as long as 15 look-ups."""
    rig = Rig(
        clock, num_rows, step_s=lambda num: step_s * (1.1 if num else 1.0),
        look_s=70e-6, token_s=4e-6, finds=False,
    ).run(1500)  # fmt: skip
    assert rig.drafter.num_idle > 0 and rig.drafter._plain_rests.look_s(1) < 75e-6
    rig.finds = True
    rig.run(1500)
    assert sum(map(bool, rig.drafted)) > 1500 - 1.1 * MAX_DEBT_STEPS


def test_tokens_indexed_after_a_rest_lower_the_balance(clock: Clock) -> None:
    rig = Rig(clock, 64, token_s=STEP_S / 640, finds=False).run(100)
    assert rig.drafter._plain_rests.look_s(64) < 1e-9 and rig.drafter._plain_rests.balance < 0


@pytest.mark.parametrize("few", [1.3, 1.6])
def test_sample_decides_for_all_rows_whether_plans_wait(clock: Clock, few: float) -> None:
    """Plans overlap without drafts. Eight rows alone gain less than the step's extra time."""
    rig = Rig(clock, 64, step_s=lambda num: STEP_S * (few if num else 1.0))
    rig.know((0, 32, 256))
    drafter, rows = rig.drafter, np.arange(64)
    drafter._flowing.observe(64, STEP_S)
    waits = []
    for is_sampled in (False, True):
        drafter._plain_rests.is_sampled = is_sampled
        found = [rig.sequences[row] for row in drafter.draftable(rig.table, rows)]
        assert len(found) == (NUM_SAMPLED if is_sampled else 64)
        drafter.decide_wait(found, 1, 64)
        waits.append(drafter.holds_back)
        drafter.holds_back = False
    assert waits == [True, True]


def test_rests_in_debt_are_bounded_and_grow() -> None:
    rests, lengths = Rests(1), list[int]()
    for _ in range(40):
        step = rests.until
        rests.spend(step, 0.1)
        rests.miss(step, is_sample=False)
        lengths.append(rests.until - step)
    assert max(lengths[:7]) < 40 and 120 < lengths[-1] < 140
    for num_misses in (40, GROWTH_LOOKS - 1):  # the next miss makes rests twice as long
        rests.num_misses = num_misses
        rests.spend(rests.until, 1000.0)
        rests.miss(rests.until, is_sample=False)
        assert rests.until == rests.balanced_at + MAX_DEBT_STEPS


def test_debt_shrinks_when_look_ups_take_no_time() -> None:
    """A device's look-ups only report misses."""
    rests = Rests(1)
    rests.spend(0, 1.0)
    rests.miss(0, is_sample=False)
    assert rests.until > 100
    rests.miss(rests.until, is_sample=False)
    assert rests.until - rests.balanced_at == 1


# ---- numbers -------------------------------------------------------------------------------------


def test_time_of_a_rest_is_not_counted_as_step_time(clock: Clock) -> None:
    """Also if the rest ends early, with a plan in flight that was made during the rest."""
    rig = Rig(clock, 1).run(4)
    drafter = rig.drafter
    num_steps = drafter._num_steps
    drafter.skip_plans(4)
    clock.now_s += 100.0
    drafter.skip_plans(-2)
    drafter.observe(rig.plan(), Mock())
    assert drafter._num_steps == num_steps + 2 and not drafter.num_idle
    every = drafter._times, drafter._verified, drafter._flowing, drafter._flowing_verified
    assert all((times.seconds(1) or 0.0) < 1.0 for times in every)


def test_rests_grow_with_misses_up_to_the_limit() -> None:
    assert [rest_after(num, MAX_REST_STEPS) for num in (0, 4, 5, 6, 7, 8, 9)] == [
        1, 1, 2, 4, 8, 16, 16
    ]  # fmt: skip
    assert rest_after(10**6, 10**6) == 1024
    assert steps_for(0.0, 1.0) == 1 and steps_for(0.0011, 0.02) == 11


def test_an_empty_sample_is_no_refusal() -> None:
    rests, step = Rests(1), 0
    assert [rests.refuse(step) for _ in range(6)] == [2, 4, 8, 16, 32, 32]
    rests = Rests(1)
    rests.refuse(step)
    for step in range(2, 20):
        rests.miss(step, is_sample=True)
        assert rests.until == step + 2 and rests.is_sampled
    rests.miss(20, is_sample=False)
    assert rests.until == 21 and not rests.is_sampled and not rests.num_refused


def test_refusals_are_reset_once_all_rows_have_drafts() -> None:
    rests = Rests(1)
    rests.refuse(0)
    rests.refuse(4)
    rests.end(12, is_sample=True)
    assert rests.until == 13 and not rests.is_sampled
    assert rests.refuse(13) == 8, "the sample did not represent all rows"
    rests.end(30, is_sample=True)
    rests.end(31, is_sample=False)
    assert rests.refuse(32) == 2
