"""Rests of a drafter: steps without look-ups, so that failed ones take little time.

Rows with a grammar and all others are two kinds, and each kind rests on its own. So refused drafts
of many rows never hide the tokens that grammars force in a few.

    a look-up of a kind        the steps until the next one
    found nothing              grow up to `max_steps`, which follows from the time of look-ups
    found drafts, no gain      double up to MAX_REFUSED_STEPS; then only a sample is looked at
    found nothing in a sample  as many as before
    led to drafts              one. After a sample, all rows are looked at

Each kind also has a balance, in units of the time of a step. Each step adds EARNED_SHARE, or less
after many failed look-ups. Failed look-ups subtract their time. Draft tokens add what they gained,
or subtract what they lost; a sample's draft tokens do neither. While the balance is negative, a
failed look-up or a loss lets the rows rest until it is zero again, for MAX_DEBT_STEPS at most. So
look-ups and draft tokens cost no more than they have gained, plus a small share of the time.
"""

from collections import deque
from dataclasses import dataclass, field

PATIENCE = 4  # failed look-ups in a row, before a rest gets longer than a step
REST_STEPS, MAX_REST_STEPS = 4, 16  # maximum steps of a rest, if look-ups take little or much time
MAX_REFUSED_STEPS = 32  # maximum steps of a rest after drafts that would not pay off
NUM_SAMPLED = 8  # rows that are looked at after such a rest, if there are many
MIN_EACH = 4  # rows that each of them stands for, if there are fewer
LOOK_SHARE = 0.005  # share of the time of steps that failed look-ups may take
EARNED_SHARE = 0.003  # of the same; the rest is for the loop's work before and after a look-up
MAX_DEBT_STEPS = 256  # maximum steps of a rest with a negative balance
FIRST_BALANCE, MAX_BALANCE = 0.5, 2.0  # without gains at most, and with them
MAX_LOSS = 0.5  # steps that one step with draft tokens is assumed to lose at most
MAX_GROWTH, GROWTH_LOOKS = 4, 8  # of such rests, and look-ups without drafts until they double
NUM_LOOKS = 5  # recent look-ups whose median time counts


def rest_after(num_misses: int, max_steps: int) -> int:
    """Return in how many steps to look again, after `num_misses` failed look-ups in a row."""
    return min(max_steps, 1 << min(10, max(0, num_misses - PATIENCE)))


def steps_for(look_s: float, step_s: float) -> int:
    """Return in how many steps one failed look-up takes `LOOK_SHARE` of the time."""
    return 1 + int(look_s / (LOOK_SHARE * step_s + 1e-9))


@dataclass(slots=True)
class Rests:
    """Rests of the rows of one kind.

    max_steps: maximum steps of a rest after failed look-ups. until: step before which the rows
    rest. num_misses: look-ups in a row without drafts. num_refused: how many of them found drafts
    that would not pay off, since the last drafts for all rows. is_sampled: whether the next look-up
    is for a sample of the rows. balance: of times, at the step `balanced_at`. row_times: recent
    times of look-ups for one row, in seconds.
    """

    max_steps: int
    until: int = 0
    num_misses: int = 0
    num_refused: int = 0
    is_sampled: bool = False
    balance: float = FIRST_BALANCE
    balanced_at: int = 0
    row_times: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_LOOKS))

    def end(self, step: int, *, is_sample: bool) -> None:
        """End the rest, since drafts pay off. is_sample: for a sample of the rows; then it is
        open whether they do so for all."""
        self.until, self.num_misses, self.is_sampled = step + 1, 0, False
        if not is_sample:
            self.num_refused = 0

    def miss(self, step: int, *, is_sample: bool) -> None:
        """Set the rest after a look-up that found nothing."""
        if not is_sample:
            self.num_refused, self.is_sampled = 0, False
        self._rest(step)

    def refuse(self, step: int) -> int:
        """Set the rest after drafts that would not pay off. Return its steps."""
        self.num_refused += 1
        self.is_sampled = True
        self._rest(step)
        return self.until - step

    def look_s(self, num_rows: int) -> float:
        """Return the expected seconds of a look-up for so many rows."""
        times = sorted(self.row_times)
        return num_rows * times[len(times) // 2] if times else 0.0

    def gain(self, step: int, num_steps: float, num_spent: float = 0.0) -> None:
        """Add what draft tokens gained to the balance, or what they lost if that is negative, and
        subtract the time of their look-up. Both are numbers of steps. After a loss, rows rest while
        the balance is negative."""
        self.spend(step, num_spent - max(num_steps, -MAX_LOSS))
        if num_steps < num_spent:
            self._rest_in_debt(step)

    def spend(self, step: int, num_steps: float) -> None:
        """Subtract a time from the balance. num_steps: the time as a number of steps."""
        earned = self._earned_share * max(0, step - self.balanced_at)
        balance = max(self.balance, min(FIRST_BALANCE, self.balance + earned)) - num_steps
        self.balance = min(MAX_BALANCE, max(-MAX_DEBT_STEPS * self._earned_share, balance))
        self.balanced_at = step

    @property
    def _earned_share(self) -> float:
        """Return the share of a step that each step adds to the balance."""
        return EARNED_SHARE / min(MAX_GROWTH, 1 << min(10, self.num_misses // GROWTH_LOOKS))

    def _rest(self, step: int) -> None:
        self.num_misses += 1
        refused = 1 << min(10, self.num_refused) if self.num_refused else 0
        num = max(rest_after(self.num_misses, self.max_steps), min(MAX_REFUSED_STEPS, refused))
        self.until = step + num
        self._rest_in_debt(step)

    def _rest_in_debt(self, step: int) -> None:
        """Make the rest long enough for a negative balance, as far as allowed. After a long one,
        only a sample is looked at."""
        self.spend(step, 0.0)  # settles what was earned, and the bound for the number of misses
        num = int(-self.balance / self._earned_share)
        self.until = max(self.until, step + num)
        self.is_sampled |= num > MAX_REST_STEPS
